"""What collectives give: sums in rank order, rounded where the wire rounds, and the bytes they cost."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from stretto.exchange import WIRES, Exchange
from stretto.flat import Layout, plan_layout
from stretto.groups.private import private_group
from tests.processes import run_ranks

WORLD_SIZES = (1, 3)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
KINDS = {"direct": False, "native": True}
"""Whether the backend adds."""
COMBINATIONS = list(itertools.product(KINDS, DTYPES))


def layout_for(world_size: int) -> Layout:
    """Return a layout of several buckets in two flat sets: float32, and bfloat16 that accumulates in itself."""
    model = nn.ModuleList([nn.Linear(19, 40), nn.Linear(40, 11), nn.Linear(9, 30).bfloat16()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return plan_layout(model, optimizer, world_size=world_size, bucket_bytes=2048, widen=False)[0]


def contribution(layout: Layout, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(flat.numel, generator=generator).to(flat.accumulation_dtype) for flat in layout.sets]


def new_sums(layout: Layout, parts: int) -> list[Tensor]:
    return [torch.full((bucket.numel // parts,), torch.nan) for bucket in layout.buckets]


def wait(work: dist.Work, what: str) -> None:
    work.wait()


def perform(rank: int, world_size: int) -> dict[str, Any]:
    """Return the outcome of every collective of every exchange and wire."""
    layout = layout_for(world_size)
    results: dict[str, Any] = {}
    for kind, wire in COMBINATIONS:
        exchange = Exchange(private_group(), layout, WIRES[wire], wait, is_native=KINDS[kind])
        results[f"{kind} {wire}"] = {
            "scattered": counted(exchange, layout, exchange.reduce_scatter, rank, world_size),
            "reduced": counted(exchange, layout, exchange.all_reduce, rank, 1),
            "gathered": gathered(exchange, layout, rank),
            "kept": [
                keeps(reduce, layout, rank, parts)
                for reduce, parts in ((exchange.reduce_scatter, world_size), (exchange.all_reduce, 1))
            ],
            "records": exchange.gather_bytes(bytes([rank, 7])),
        }
    return results


def counted(
    exchange: Exchange, layout: Layout, reduce: Callable[..., None], rank: int, parts: int
) -> tuple[list[Tensor], int]:
    sums, before = new_sums(layout, parts), exchange.sent_bytes
    reduce(contribution(layout, rank), sums)
    return sums, exchange.sent_bytes - before


def keeps(reduce: Callable[..., None], layout: Layout, rank: int, parts: int) -> bool:
    flats = contribution(layout, rank)
    reduce(flats, new_sums(layout, parts))
    return all(map(torch.equal, flats, contribution(layout, rank)))


def gathered(exchange: Exchange, layout: Layout, rank: int) -> tuple[list[Tensor], int]:
    flats, before = contribution(layout, rank), exchange.sent_bytes
    exchange.all_gather(flats, [exchange.wire.values.of(flat.dtype) for flat in layout.sets])
    return flats, exchange.sent_bytes - before


@functools.cache
def outcomes(world_size: int) -> list[dict[str, Any]]:
    return [perform(0, 1)] if world_size == 1 else run_ranks(world_size, perform, world_size)


def sent_by(rank: int, layout: Layout, wire: torch.dtype) -> list[Tensor]:
    """Return what a rank's contribution becomes on the wire, per bucket, in float32."""
    flats = contribution(layout, rank)
    return [flats[b.set_index][b.start : b.stop].to(wire).float() for b in layout.buckets]


every_case = pytest.mark.parametrize("wire", DTYPES)
every_world = pytest.mark.parametrize("world_size", WORLD_SIZES)


@every_world
@every_case
def test_direct_sum_is_in_rank_order_and_in_float32(wire: str, world_size: int) -> None:
    layout = layout_for(world_size)
    expected = sent_by(0, layout, DTYPES[wire])
    for rank in range(1, world_size):
        expected = [a + b for a, b in zip(expected, sent_by(rank, layout, DTYPES[wire]), strict=True)]
    for rank, result in enumerate(outcomes(world_size)):
        scattered, _ = result[f"direct {wire}"]["scattered"]
        for whole, part in zip(expected, scattered, strict=True):
            assert torch.equal(part, whole.chunk(world_size)[rank])


@every_world
@every_case
def test_direct_all_reduce_is_the_sum_rounded_to_the_wire_on_every_rank(wire: str, world_size: int) -> None:
    layout = layout_for(world_size)
    scattered = [result[f"direct {wire}"]["scattered"][0] for result in outcomes(world_size)]
    for index, bucket in enumerate(layout.buckets):
        narrow = min(DTYPES[wire], layout.sets[bucket.set_index].accumulation_dtype, key=lambda d: d.itemsize)
        whole = torch.cat([parts[index] for parts in scattered]).to(narrow).float()
        for result in outcomes(world_size):
            assert torch.equal(result[f"direct {wire}"]["reduced"][0][index], whole)


@every_world
@every_case
@pytest.mark.parametrize("collective", ["scattered", "reduced"])
def test_native_sum_equals_direct_within_rounding(collective: str, wire: str, world_size: int) -> None:
    layout = layout_for(world_size)
    sizes = [torch.zeros(bucket.numel) for bucket in layout.buckets]
    for rank in range(world_size):
        sizes = [
            size + part.abs() for size, part in zip(sizes, sent_by(rank, layout, DTYPES[wire]), strict=True)
        ]
    for rank, result in enumerate(outcomes(world_size)):
        direct, native = (result[f"{kind} {wire}"][collective][0] for kind in ("direct", "native"))
        for index, (left, right) in enumerate(zip(direct, native, strict=True)):
            size = sizes[index].chunk(world_size)[rank] if collective == "scattered" else sizes[index]
            # Native adds in the wire's precision, u relative to Σ|x| per addition; the sum of an all-reduce is
            # rounded once more, to the narrower of wire and buffer.
            sixteen = torch.bfloat16 in (DTYPES[wire], layout.sets[layout.buckets[index].set_index].dtype)
            unit_roundoff = 2.0**-8 if sixteen else 2.0**-24
            assert ((left - right).abs() <= (world_size + 1) * unit_roundoff * size).all()


@every_world
@every_case
@pytest.mark.parametrize("kind", KINDS)
def test_a_sum_leaves_the_gradients_as_they_are(kind: str, wire: str, world_size: int) -> None:
    """They may have to be summed again, and the round's report looks at them behind the sum."""
    for result in outcomes(world_size):
        assert result[f"{kind} {wire}"]["kept"] == [True, True]


@every_world
@every_case
@pytest.mark.parametrize("kind", KINDS)
def test_gather_brings_every_owners_slice_rounded_to_the_wire(kind: str, wire: str, world_size: int) -> None:
    layout = layout_for(world_size)
    for result in outcomes(world_size):
        flats, _ = result[f"{kind} {wire}"]["gathered"]
        for bucket, owner in itertools.product(layout.buckets, range(world_size)):
            low, high = bucket.owned_range(owner, world_size)
            own = contribution(layout, owner)[bucket.set_index][low:high]
            assert torch.equal(flats[bucket.set_index][low:high], own.to(DTYPES[wire]).to(own.dtype))


@every_world
def test_records_come_back_in_rank_order(world_size: int) -> None:
    expected = [bytes([rank, 7]) for rank in range(world_size)]
    for result in outcomes(world_size):
        assert [
            (kind, wire) for kind, wire in COMBINATIONS if result[f"{kind} {wire}"]["records"] != expected
        ] == []


@every_world
@every_case
@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_to_others_is_counted(kind: str, wire: str, world_size: int) -> None:
    layout = layout_for(world_size)
    itemsizes = [
        DTYPES[wire].itemsize
        if kind == "native"
        else min(DTYPES[wire].itemsize, layout.sets[bucket.set_index].accumulation_dtype.itemsize)
        for bucket in layout.buckets
    ]
    to_others = sum(
        bucket.numel * itemsize // world_size * (world_size - 1)
        for bucket, itemsize in zip(layout.buckets, itemsizes, strict=True)
    )
    for result in outcomes(world_size):
        assert result[f"{kind} {wire}"]["scattered"][1] == to_others
        assert result[f"{kind} {wire}"]["reduced"][1] == 2 * to_others
