"""In a set cut by tensor every slice holds whole tensors, and padding is bounded."""

import itertools
import random

import pytest
import torch
from torch import nn

from stretto.flat import ALIGNMENT, plan_layout
from tests.draws import seeds
from tests.flat.test_layout import plan, random_shapes

BUCKET_BYTES = (1, 4096, 2**16, 2**24)


def aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


@pytest.mark.parametrize("seed", seeds(200))
def test_whole_tensors_lie_in_one_slice_each_and_padding_is_bounded(seed: int) -> None:
    draw = random.Random(seed)
    shapes = random_shapes(draw)
    layout = plan(shapes, draw, {0, 1}, bucket_bytes=draw.choice(BUCKET_BYTES))
    (flat,), world_size = layout.sets, layout.world_size

    assert sorted(slot.shape for slot in layout.slots) == sorted(shapes)
    assert [slot for slot in layout.slots if not (slot.is_whole and slot.start % ALIGNMENT == 0)] == []
    assert [slot.index for slot in layout.slots] == list(range(len(shapes)))
    places = [(slot.start, slot.stop) for slot in layout.slots]
    assert places == sorted(places)
    assert [(a, b) for a, b in itertools.pairwise(places) if not a[1] <= b[0]] == []

    buckets = sorted(layout.buckets, key=lambda bucket: bucket.start)
    slices = [bucket.owned_range(rank, world_size) for bucket in buckets for rank in range(world_size)]
    assert slices[0][0] == 0
    assert slices[-1][1] == flat.numel
    assert [(a, b) for a, b in itertools.pairwise(slices) if a[1] != b[0]] == []
    for start, stop in places:
        assert any(low <= start and stop <= high for low, high in slices)

    content = sum(aligned(slot.numel) for slot in layout.slots)
    largest = max(aligned(slot.numel) for slot in layout.slots)
    if len(buckets) > 1:
        assert flat.numel <= 1.1 * content
    else:
        assert flat.numel <= max(world_size * ALIGNMENT, content + (world_size - 1) * largest)


@pytest.mark.parametrize("seed", seeds(40))
def test_groups_cut_in_different_ways_have_sets_of_their_own(seed: int) -> None:
    draw = random.Random(seed)
    shapes = [*random_shapes(draw), (3, 5)]
    layout = plan(shapes, draw, {1}, bucket_bytes=draw.choice(BUCKET_BYTES))
    assert len(layout.sets) == 2
    for slot in layout.slots:
        assert slot.is_whole == (slot.group == 1) == (slot.set_index == 1)
    found = [{slot.index for slot in inside} for inside in layout.slots_by_bucket()]
    expected = [
        {
            slot.index
            for slot in layout.slots
            if slot.set_index == bucket.set_index
            and max(slot.start, bucket.start) < min(slot.stop, bucket.stop)
        }
        for bucket in layout.buckets
    ]
    assert found == expected


def test_buckets_are_filled_in_order_of_arrival() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12)))
    layout, _ = plan_layout(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        world_size=2,
        bucket_bytes=4 * 64 * 64 * 4,
        widen=True,
        whole_groups={0},
    )
    inside = [
        sorted(int(slot.name.partition(".")[0]) for slot in slots) for slots in layout.slots_by_bucket()
    ]
    assert inside == [[8, 9, 10, 11], [4, 5, 6, 7], [0, 1, 2, 3]]


def test_digest_tells_whole_tensors_from_those_that_may_be_cut() -> None:
    digests = {plan([(8, 8), (64,)], random.Random(3), groups).digest() for groups in (set(), {0}, {0, 1})}
    assert len(digests) == 3
