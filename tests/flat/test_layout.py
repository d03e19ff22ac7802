"""The map from parameters to flat elements to owners covers everything once."""

import itertools

import pytest
import torch
from torch import nn

from stretto.errors import UnsupportedModel, UnsupportedOptimizer
from stretto.exchange import WIRES
from stretto.flat import ALIGNMENT, Layout, check_parameters, plan_layout
from stretto.link import MESSAGE_BYTES


class Shapes(nn.Module):
    """Parameters of given shapes, the odd-numbered ones in 16 bits where `mixed`."""

    def __init__(self, shapes: list[tuple[int, ...]], *, mixed: bool) -> None:
        super().__init__()
        dtypes = (torch.float32, torch.bfloat16 if mixed else torch.float32)
        self.values = nn.ParameterList(
            nn.Parameter(torch.zeros(shape, dtype=dtypes[index % 2])) for index, shape in enumerate(shapes)
        )


MODELS = {
    "one element": [(1,)],
    "aligned": [(64,), (8, 16), (2, 64)],
    "odd": [(7, 33), (33,), (33, 33), (), (5,), (3, 1, 2)],
    "one large among small": [(3,), (90, 90), (2,)],
    "empty parameter": [(4,), (0, 3), (5,)],
}
WORLD_SIZES = (1, 3)
BUCKET_BYTES = (1, 1024, 2**20)
LAYOUTS = list(itertools.product(MODELS, (False, True), WORLD_SIZES, BUCKET_BYTES))


def plan(name: str, mixed: bool, world_size: int, bucket_bytes: int) -> tuple[Layout, nn.Module]:
    model = Shapes(MODELS[name], mixed=mixed)
    parameters = list(model.parameters())
    groups = [{"params": parameters[:1]}, {"params": parameters[1:]}] if len(parameters) > 1 else parameters
    optimizer = torch.optim.SGD(groups, lr=0.1)
    return plan_layout(model, optimizer, world_size=world_size, bucket_bytes=bucket_bytes, widen=True)[
        0
    ], model


every_layout = pytest.mark.parametrize(("name", "mixed", "world_size", "bucket_bytes"), LAYOUTS)


@every_layout
def test_slots_hold_every_parameter_once_and_do_not_touch(
    name: str, mixed: bool, world_size: int, bucket_bytes: int
) -> None:
    layout, model = plan(name, mixed, world_size, bucket_bytes)
    named = dict(model.named_parameters())
    assert sorted(slot.name for slot in layout.slots) == sorted(named)
    assert [slot.index for slot in layout.slots] == list(range(len(layout.slots)))
    for index, flat in enumerate(layout.sets):
        slots = layout.slots_of_set(index)
        assert [slot for slot in slots if slot.shape != named[slot.name].shape] == []
        assert [slot for slot in slots if slot.start % ALIGNMENT != 0] == []
        assert [(a, b) for a, b in itertools.pairwise(slots) if not a.stop <= b.start] == []
        assert slots[-1].stop <= flat.numel
        assert {named[slot.name].dtype for slot in slots} == {flat.dtype}


@every_layout
def test_owned_ranges_cover_every_set_once_in_equal_aligned_slices(
    name: str, mixed: bool, world_size: int, bucket_bytes: int
) -> None:
    layout, _ = plan(name, mixed, world_size, bucket_bytes)
    for index, flat in enumerate(layout.sets):
        buckets = sorted((b for b in layout.buckets if b.set_index == index), key=lambda bucket: bucket.start)
        ranges = [bucket.owned_range(rank, world_size) for bucket in buckets for rank in range(world_size)]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == flat.numel
        assert [(a, b) for a, b in itertools.pairwise(ranges) if a[1] != b[0]] == []
        assert [(pair, edge) for pair in ranges for edge in pair if edge % ALIGNMENT != 0] == []
        assert [bucket for bucket in buckets if bucket.numel % (world_size * ALIGNMENT) != 0] == []


@every_layout
def test_buckets_are_not_larger_than_asked_for_plus_alignment(
    name: str, mixed: bool, world_size: int, bucket_bytes: int
) -> None:
    layout, _ = plan(name, mixed, world_size, bucket_bytes)
    for bucket in layout.buckets:
        itemsize = layout.sets[bucket.set_index].accumulation_dtype.itemsize
        assert bucket.numel <= bucket_bytes // itemsize + world_size * ALIGNMENT


@pytest.mark.parametrize("wire", WIRES)
def test_no_rank_sends_another_less_than_16_kib_of_a_bucket_however_many_ranks_there_are(wire: str) -> None:
    model = nn.utils.skip_init(nn.Linear, 2**13, 2**12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bytes_per_value = WIRES[wire].bytes_per_value
    for ranks in (2, 3, 8, 64, 100, 1024):
        layout, _ = plan_layout(
            model, optimizer, world_size=ranks, bucket_bytes=None, widen=True, bytes_per_value=bytes_per_value
        )
        sent = [bucket.numel / ranks * bytes_per_value for bucket in layout.buckets]
        # One bucket takes what is left over; slices are rounded to `ALIGNMENT`.
        assert sorted(sent)[1 if len(sent) > 1 else 0] > 0.9 * min(MESSAGE_BYTES, sum(sent)), ranks
        assert len(sent) > 1 or layout.numel * bytes_per_value < 1.1 * ranks * MESSAGE_BYTES, ranks


def test_padding_is_small() -> None:
    layout, model = plan("one large among small", False, 5, 2**20)
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert layout.numel - numel <= ALIGNMENT * len(layout.slots) + 5 * ALIGNMENT


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
    digests = [plan(*arguments)[0].digest() for arguments in LAYOUTS if arguments[3] == 1024]
    assert len(set(digests)) > len(MODELS)
    assert plan("odd", False, 2, 1024)[0].digest() == plan("odd", False, 2, 1024)[0].digest()
    assert plan("odd", False, 2, 1024)[0].digest() != plan("odd", False, 3, 1024)[0].digest()


def test_model_without_trainable_parameter_is_refused() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(UnsupportedModel, match="no trainable parameter"):
        check_parameters(model)


def test_trainable_parameter_in_no_group_is_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UnsupportedOptimizer, match=r"in no group of the optimizer, among them \['bias'\]"):
        plan_layout(model, torch.optim.SGD([model.weight]), world_size=1, bucket_bytes=1, widen=True)
