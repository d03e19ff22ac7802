"""Gradients in 8 bits: how much one exchange loses, and that the next ones bring it."""

import functools

import pytest
import torch
from torch import Tensor

from stretto.exchange import Int8Exchange
from stretto.exchange.int8 import BLOCK, pack, packed_bytes, unpack
from stretto.flat import Layout
from stretto.groups.private import private_group
from tests.exchange.test_exchange import contribution, layout_for, new_sums, wait
from tests.processes import run_ranks

ROUNDS = 20


def packed(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return what one row unpacks to, and what packing has left behind."""
    left = values.clone().view(1, -1)
    row = torch.empty(1, packed_bytes(values.numel()), dtype=torch.uint8)
    pack(left, row)
    return unpack(row[0]), left[0]


def test_a_value_is_off_by_half_a_scale_at_most_and_the_rest_is_kept() -> None:
    values = torch.randn(4 * BLOCK, generator=torch.Generator().manual_seed(0)) * torch.logspace(
        -6, 6, 4 * BLOCK
    )
    found, left = packed(values)
    scales = values.view(-1, BLOCK).abs().amax(1) / 127
    # Half a scale, and the rounding of the quotient and of the product: two units in the last place of 127 scales.
    bounds = (scales * (0.5 + 127 * 2 * 2**-23)).repeat_interleave(BLOCK)
    assert bool((found - values).abs().le(bounds).all())
    assert torch.equal(values - found, left)


def test_zeros_stay_zeros_and_the_largest_value_of_a_block_stays_itself() -> None:
    values = torch.zeros(2 * BLOCK)
    values[BLOCK] = -12.7
    found, left = packed(values)
    assert torch.equal(found, values)
    assert not left.any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_is_seen_by_the_owner_and_not_kept(bad: float) -> None:
    values = torch.ones(2 * BLOCK)
    values[3] = bad
    found, left = packed(values)
    assert not bool(found[:BLOCK].isfinite().all())
    assert torch.equal(found[BLOCK:], values[BLOCK:])
    assert not left.any()


def sums_of_rounds(rank: int, world_size: int) -> list[tuple[list[Tensor], list[Tensor], int]]:
    """Return, per round of equal contributions: the sums, the bucket-wise all-reduced sums, and bytes sent."""
    layout = layout_for(world_size)
    exchanges = [Int8Exchange(private_group(), layout, wait) for _ in range(2)]
    rounds = []
    for _ in range(ROUNDS):
        slices, wholes = new_sums(layout, world_size), new_sums(layout, 1)
        before = exchanges[0].sent_bytes
        exchanges[0].reduce_scatter(contribution(layout, rank), slices)
        sent = exchanges[0].sent_bytes - before
        exchanges[1].all_reduce(contribution(layout, rank), wholes)
        rounds.append((slices, wholes, sent))
    return rounds


@functools.cache
def rounds_on(world_size: int) -> list[list[tuple[list[Tensor], list[Tensor], int]]]:
    return run_ranks(world_size, sums_of_rounds, world_size)


def exact_sums(layout: Layout, world_size: int) -> list[Tensor]:
    """Return the sum per bucket, in float64."""
    flats = [contribution(layout, rank) for rank in range(world_size)]
    return [
        sum((flat[b.set_index][b.start : b.stop].double() for flat in flats), torch.zeros(b.numel).double())
        for b in layout.buckets
    ]


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_one_exchange_loses_the_next_ones_bring(world_size: int) -> None:
    """After T rounds the sum of all sums is off by what is still to be sent: e_T of every rank, not T errors.

    |e| is half a scale at most, and a scale is max |g + e| / 127 <= max |g| / (127 - 1/2): per rank at most
    max |g| / 253. Over T rounds float32 adds rounding of a few units in the last place each.
    """
    layout = layout_for(world_size)
    largest = max(float(flat.abs().max()) for r in range(world_size) for flat in contribution(layout, r))
    bound = world_size * (largest / 253 + ROUNDS * 8 * 2**-24 * largest)
    for rank, rounds in enumerate(rounds_on(world_size)):
        for index, (bucket, exact) in enumerate(
            zip(layout.buckets, exact_sums(layout, world_size), strict=True)
        ):
            low, high = bucket.owned_range(rank, world_size)
            exact_slice = exact[low - bucket.start : high - bucket.start]
            total = sum((slices[index].double() for slices, _, _ in rounds), torch.zeros(high - low).double())
            assert float((total - ROUNDS * exact_slice).abs().max()) <= bound


@pytest.mark.parametrize("world_size", [1, 3])
def test_an_all_reduce_gives_every_rank_the_owners_sums_in_bf16(world_size: int) -> None:
    layout = layout_for(world_size)
    ranks = rounds_on(world_size)
    for number in range(ROUNDS):
        for index, bucket in enumerate(layout.buckets):
            owned = torch.cat([rounds[number][0][index] for rounds in ranks])
            for rounds in ranks:
                found = rounds[number][1][index]
                assert torch.equal(found, owned.bfloat16().float()), bucket


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_contribution_takes_a_byte_and_a_sixteenth_per_element(world_size: int) -> None:
    layout = layout_for(world_size)
    expected = sum(b.numel for b in layout.buckets) * 17 // 16 // world_size * (world_size - 1)
    assert {sent for rounds in rounds_on(world_size) for _, _, sent in rounds} == {expected}
