"""The map from parameters to flat elements to owners covers everything once."""

import itertools
import random
from typing import Any

import pytest
import torch
from torch import nn

from stretto.exchange import WIRES
from stretto.flat import ALIGNMENT, Layout, plan_layout
from stretto.link import MESSAGE_BYTES
from tests.draws import seeds


class Shapes(nn.Module):
    """Parameters of given shapes, the odd-numbered ones in 16 bits where `mixed`."""

    def __init__(self, shapes: list[tuple[int, ...]], *, mixed: bool) -> None:
        super().__init__()
        dtypes = (torch.float32, torch.bfloat16 if mixed else torch.float32)
        self.values = nn.ParameterList(
            nn.Parameter(torch.zeros(shape, dtype=dtypes[index % 2])) for index, shape in enumerate(shapes)
        )


def random_shapes(draw: random.Random) -> list[tuple[int, ...]]:
    """Draw a model: many tensors alike, many unlike, or one that outweighs the rest; some without elements."""
    largest = draw.choice((1, 8, 60))
    shapes = [
        tuple(draw.randint(1, largest) for _ in range(draw.randint(0, 3))) for _ in range(draw.randint(1, 60))
    ]
    return shapes + draw.choice(([], [(0, 3)], [(300, 200)], [(64, 64)] * 24))


def plan(
    shapes: list[tuple[int, ...]],
    draw: random.Random,
    whole_groups: set[int],
    *,
    bucket_bytes: int = 1024,
    mixed: bool = False,
) -> Layout:
    """Plan the shapes, dealt to two groups, with a random number of ranks and of parts."""
    model = Shapes(shapes, mixed=mixed)
    values = list(model.parameters())
    groups = [{"params": values[::2]}, {"params": values[1::2]}]
    return plan_layout(
        model,
        torch.optim.SGD(groups, lr=0.1),
        world_size=draw.choice((1, 2, 3, 8)),
        bucket_bytes=bucket_bytes,
        widen=True,
        parts=draw.choice((1, 1, 3)),
        whole_groups=whole_groups,
    )[0]


@pytest.mark.parametrize("seed", seeds(120))
def test_slots_hold_every_parameter_once_and_owned_ranges_cover_every_set_once(seed: int) -> None:
    draw = random.Random(seed)
    shapes, bucket_bytes = random_shapes(draw), draw.choice((1, 1024, 2**16, 2**20))
    layout = plan(shapes, draw, set(), bucket_bytes=bucket_bytes, mixed=draw.random() < 0.5)
    world_size = layout.world_size
    assert sorted(slot.shape for slot in layout.slots) == sorted(shapes)
    assert [slot.index for slot in layout.slots] == list(range(len(shapes)))
    assert layout.numel - sum(slot.numel for slot in layout.slots) <= ALIGNMENT * (
        len(shapes) + 3 * world_size * len(layout.sets)
    )
    for index, flat in enumerate(layout.sets):
        slots = layout.slots_of_set(index)
        assert [slot for slot in slots if slot.start % ALIGNMENT != 0] == []
        assert [(a, b) for a, b in itertools.pairwise(slots) if not a.stop <= b.start] == []
        assert slots[-1].stop <= flat.numel
        buckets = sorted((b for b in layout.buckets if b.set_index == index), key=lambda bucket: bucket.start)
        ranges = [bucket.owned_range(rank, world_size) for bucket in buckets for rank in range(world_size)]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == flat.numel
        assert [(a, b) for a, b in itertools.pairwise(ranges) if a[1] != b[0]] == []
        assert [(pair, edge) for pair in ranges for edge in pair if edge % ALIGNMENT != 0] == []
        most = bucket_bytes // flat.accumulation_dtype.itemsize + world_size * ALIGNMENT
        assert [bucket for bucket in buckets if bucket.numel > most] == []
        assert [bucket for bucket in buckets if bucket.numel % (world_size * ALIGNMENT) != 0] == []


@pytest.mark.parametrize("wire", WIRES)
def test_no_rank_sends_another_less_than_16_kib_of_a_bucket_however_many_ranks_there_are(wire: str) -> None:
    model = nn.utils.skip_init(nn.Linear, 2**13, 2**12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bytes_per_value = WIRES[wire].bytes_per_value
    on_wire = min(4.0, bytes_per_value)  # no value is sent in more than it is stored in
    for ranks in (2, 3, 8, 64, 100, 1024):
        layout, _ = plan_layout(
            model, optimizer, world_size=ranks, bucket_bytes=None, widen=True, bytes_per_value=bytes_per_value
        )
        sent = [bucket.numel / ranks * on_wire for bucket in layout.buckets]
        # One bucket takes what is left over; slices are rounded to `ALIGNMENT`.
        assert sorted(sent)[1 if len(sent) > 1 else 0] > 0.9 * min(MESSAGE_BYTES, sum(sent)), ranks
        assert len(sent) > 1 or layout.numel * on_wire < 1.1 * ranks * MESSAGE_BYTES, ranks


def test_groups_stay_together_and_late_parameters_come_first() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases}])
    layout, parameters = plan_layout(model, optimizer, world_size=2, bucket_bytes=1024, widen=True)
    assert [slot.name for slot in layout.slots] == ["1.weight", "0.weight", "1.bias", "0.bias"]
    assert [slot.group for slot in layout.slots] == [0, 0, 1, 1]
    assert [
        (p, s) for p, s in zip(parameters, layout.slots, strict=True) if p is not model.get_parameter(s.name)
    ] == []


def test_tied_parameters_have_one_slot_and_frozen_ones_none() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model[2].weight.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    layout, _ = plan_layout(model, optimizer, world_size=1, bucket_bytes=1024, widen=True)
    assert sorted(slot.name for slot in layout.slots) == ["0.bias", "0.weight", "1.bias", "2.bias"]


@pytest.mark.parametrize(("widen", "expected"), [(True, torch.float32), (False, torch.bfloat16)])
def test_gradients_of_16_bit_parameters_accumulate_as_asked(widen: bool, expected: torch.dtype) -> None:
    model = nn.Linear(3, 3).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layout, _ = plan_layout(model, optimizer, world_size=1, bucket_bytes=1024, widen=widen)
    assert [(s.dtype, s.accumulation_dtype) for s in layout.sets] == [(torch.bfloat16, expected)]


def test_digest_tells_layouts_apart() -> None:
    def digest(seed: int, shapes: list[tuple[int, ...]], **settings: Any) -> str:
        return plan(shapes, random.Random(seed), set(), **settings).digest()

    shapes = [(7, 33), (33,), (33, 33)]
    assert digest(3, shapes) == digest(3, shapes)
    assert len({digest(seed, shapes) for seed in range(40)}) == 4  # numbers of ranks
    assert digest(3, shapes[1:]) != digest(3, shapes) != digest(3, shapes, mixed=True)
