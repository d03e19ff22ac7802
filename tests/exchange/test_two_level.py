"""Sums inside nodes first: what every rank gets, in which order it is added, and how little crosses between nodes."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.errors import ConfigError
from stretto.exchange import FP32, WIRES, Exchange, PackedWire
from stretto.flat import Layout, plan_layout
from stretto.strategies import STRATEGIES
from stretto_lab.virtual import VirtualCluster
from tests.exactness.jobs import Case, same
from tests.exchange.test_exchange import contribution, wait
from tests.workers.jobs import run

NODES = ((2, 2), (2, 3), (3, 2))
"""Nodes, and ranks on each."""


@functools.cache
def layout_for(world_size: int) -> Layout:
    model = nn.ModuleList([nn.Linear(19, 40), nn.Linear(40, 11), nn.Linear(9, 30).double()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return plan_layout(model, optimizer, world_size=world_size, bucket_bytes=2048, widen=True)[0]


def of_parameters(layout: Layout) -> list[Tensor]:
    """Which elements of flat sets are not padding."""
    found = [torch.zeros(flat.numel, dtype=torch.bool) for flat in layout.sets]
    for slot in layout.slots:
        found[slot.set_index][slot.start : slot.stop] = True
    return found


def exchange_on(group: Any, layout: Layout, wire: str, ranks_per_node: int) -> Exchange:
    return Exchange(group, layout, WIRES[wire], wait, ranks_per_node=ranks_per_node)


def summed(rank: int, group: Any, wire: str, ranks_per_node: int) -> tuple[list[Tensor], list[Tensor]]:
    """A rank's slices of the sums, and the sums of everybody."""
    layout = layout_for(group.size())
    exchange = exchange_on(group, layout, wire, ranks_per_node)
    flats = contribution(layout, rank)
    slices = [torch.empty(bucket.numel // group.size(), dtype=torch.float64) for bucket in layout.buckets]
    wholes = [torch.empty(bucket.numel, dtype=torch.float64) for bucket in layout.buckets]
    exchange.reduce_scatter(flats, slices)
    exchange.all_reduce(contribution(layout, rank), wholes, FP32)
    assert same(flats, contribution(layout, rank))
    return slices, wholes


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("nodes", "per_node"), NODES)
def test_a_sum_is_that_of_nodes_each_in_rank_order_and_rounded_between_them(
    nodes: int, per_node: int, wire: str
) -> None:
    world_size = nodes * per_node
    layout = layout_for(world_size)
    results = VirtualCluster(world_size).run(lambda rank, group: summed(rank, group, wire, per_node)).values
    for index, bucket in enumerate(layout.buckets):
        accumulated = layout.sets[bucket.set_index].accumulation_dtype
        parts = [contribution(layout, rank)[bucket.set_index] for rank in range(world_size)]
        parts = [part[bucket.start : bucket.stop].double() for part in parts]
        exact, rounded = torch.zeros(bucket.numel).double(), torch.zeros(bucket.numel).double()
        for node in range(nodes):
            inside = functools.reduce(torch.add, parts[node * per_node : (node + 1) * per_node])
            exact += inside
            for rank, part in enumerate(inside.chunk(world_size)):
                # Rank l of a node packs what goes to rank l of every node.
                drawn = WIRES[wire].drawn("sums", 0, node * per_node + rank % per_node).of(accumulated)
                content = torch.empty(drawn.num_bytes(part.numel()), dtype=torch.uint8)
                drawn.write(part, content)
                rounded.chunk(world_size)[rank].add_(drawn.read(content))
        if WIRES[wire].is_unbiased:
            rounded[~of_parameters(layout)[bucket.set_index][bucket.start : bucket.stop]] = 0.0
        for rank, (slices, wholes) in enumerate(results):
            assert torch.equal(slices[index], rounded.chunk(world_size)[rank])
            # FP32 asked for by name sends values as wide as they are; sums come back likewise.
            assert torch.allclose(wholes[index], exact, rtol=0, atol=2.0**-20)


def gathered(rank: int, group: Any, ranks_per_node: int) -> tuple[list[Tensor], list[bytes]]:
    layout = layout_for(group.size())
    exchange = exchange_on(group, layout, "fp32", ranks_per_node)
    flats = contribution(layout, rank)
    exchange.all_gather(flats, [FP32.of(flat.dtype) for flat in flats])
    return flats, exchange.gather_bytes(bytes([rank]))


@pytest.mark.parametrize(("nodes", "per_node"), NODES)
def test_a_gather_brings_every_slice_from_its_owner(nodes: int, per_node: int) -> None:
    world_size = nodes * per_node
    layout = layout_for(world_size)
    for flats, records in VirtualCluster(world_size).run(lambda r, g: gathered(r, g, per_node)).values:
        assert records == [bytes([rank]) for rank in range(world_size)]
        for bucket in layout.buckets:
            for rank in range(world_size):
                own = slice(*bucket.owned_range(rank, world_size))
                assert torch.equal(
                    flats[bucket.set_index][own], contribution(layout, rank)[bucket.set_index][own]
                )


# Whole jobs

JOBS = [
    Case(
        strategy=STRATEGIES[name](**({"rate": 0.5} if name == "local" else {})),
        dtype=torch.float64,
        lengths=(9,),
        branch="some",
        batch_norm=True,
        options=stretto.Options(bucket_bytes=4096, allow_unused=True, wire=wire),
    )
    for name in STRATEGIES
    for wire in ("fp32", *(("int8", "rotated1") if name in ("ddp", "acco", "diloco") else ()))
]


@pytest.mark.long(keep=2)
@pytest.mark.parametrize("case", JOBS, ids=lambda case: f"{case.strategy.name} {case.options.wire}")
def test_every_strategy_trains_on_nodes_as_it_does_on_ranks_that_are_alike(case: Case) -> None:
    two_levels, one_level = run(case, 4, 2), run(case, 4, None)
    for ours, theirs in zip(two_levels, one_level, strict=True):
        assert [update.micro_batches for update in ours.updates] == [u.micro_batches for u in theirs.updates]
        assert same(ours.final, two_levels[0].final)
        for a, b in zip(ours.final, theirs.final, strict=True):
            # Other associations of float64 sums; packed, other values lose something.
            tolerance = {"fp32": 1e-9, "int8": 0.05, "rotated1": 1.0}[case.options.wire]
            assert torch.allclose(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", JOBS, ids=lambda case: f"{case.strategy.name} {case.options.wire}")
def test_nodes_of_one_rank_are_ranks_to_the_bit(case: Case) -> None:
    for ours, theirs in zip(run(case, 3, 1), run(case, 3, None), strict=True):
        assert same(ours.final, theirs.final)
        assert [pair for pair in zip(ours.committed, theirs.committed, strict=True) if not same(*pair)] == []


# What crosses


def crossing(rank: int, group: Any, wire: str, ranks_per_node: int) -> tuple[int, int]:
    layout = layout_for(group.size())
    exchange = exchange_on(group, layout, wire, ranks_per_node)
    summed_slices = [torch.empty(bucket.numel // group.size()) for bucket in layout.buckets]
    exchange.reduce_scatter(contribution(layout, rank), summed_slices)
    sums = exchange.crossed_bytes
    exchange.all_gather(contribution(layout, rank), [exchange.wire.values.of(s.dtype) for s in layout.sets])
    return sums, exchange.crossed_bytes - sums


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(("nodes", "per_node"), NODES)
def test_of_a_bucket_one_part_in_the_ranks_of_a_node_crosses(nodes: int, per_node: int, wire: str) -> None:
    world_size = nodes * per_node
    layout = layout_for(world_size)
    results = VirtualCluster(world_size).run(lambda r, g: crossing(r, g, wire, per_node)).values
    contributed = sum(
        WIRES[wire].of(layout.sets[b.set_index].accumulation_dtype).num_bytes(b.numel) for b in layout.buckets
    )
    shown = sum(
        WIRES[wire].values.of(layout.sets[b.set_index].dtype).num_bytes(b.numel) for b in layout.buckets
    )
    for sums, gathers in results:
        assert sums == contributed // world_size * (nodes - 1)
        assert gathers == shown // world_size * (nodes - 1)


def test_unequal_nodes_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected a divisor of the 3 ranks"):
        run(Case(), 3, 2)


def test_every_packed_wire_has_its_errors_where_it_packs() -> None:
    for wire in (wire for wire in WIRES.values() if isinstance(wire, PackedWire) and wire.has_residual):
        for rank, found in enumerate(
            VirtualCluster(4).run(lambda r, g, name=wire.name: owing(r, g, name)).values
        ):
            for bucket, residuals in zip(layout_for(4).buckets, found, strict=True):
                slices = residuals.view(2, 2, bucket.numel // 4)
                assert slices[:, rank % 2].any()
                assert not slices[:, 1 - rank % 2].any()


def owing(rank: int, group: Any, wire: str) -> list[Tensor]:
    layout = layout_for(4)
    exchange = exchange_on(group, layout, wire, 2)
    assert exchange.feedback is not None
    flats = exchange.feedback.begin(contribution(layout, rank), [1] * len(layout.slots))
    sums = [torch.empty(bucket.numel // 4) for bucket in layout.buckets]
    exchange.run(exchange.summing(flats, sums, whole=False), exchange.feedback.add)
    exchange.feedback.commit_residuals()
    return [exchange.residuals[b.set_index][b.start : b.stop] for b in layout.buckets]
