"""A node steps as one rank with all its micro-batches would; alone, it trains synchronously."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

import stretto as st
from stretto.strategies import Strategy
from stretto_lab.virtual import VirtualCluster
from tests.bits import unequal
from tests.diloco.jobs import batch, matrix
from tests.exactness.jobs import Case, same
from tests.exactness.matrix import CLIP_NORM
from tests.workers.jobs import STRATEGIES, of_ranks, run

NORM_ROUNDING = 1e-12
"""Some 3,000 squares, added in float64 from other buckets: processors add what lies together in their own order."""
VARIED = Case(lengths=(31,), tokens=True, batch_norm=True)
WIRES = ("fp32", "int4")


def on_wire(case: Case, strategy: Strategy, wire: str) -> Case:
    options = dataclasses.replace(case.options, wire=wire)
    return dataclasses.replace(case, strategy=strategy, options=options)


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_nodes_of_one_rank_are_ranks_to_the_bit(strategy: Strategy, wire: str) -> None:
    case = on_wire(VARIED, strategy, wire)
    plain = dataclasses.replace(case, strategy=of_ranks(strategy))
    for ours, theirs in zip(run(case, 3, 1), run(plain, 3, 1), strict=True):
        for field in ("shown", "committed", "statistics"):
            pairs = zip(getattr(ours, field), getattr(theirs, field), strict=True)
            assert [pair for pair in pairs if not same(*pair)] == [], field
        assert same(ours.final, theirs.final)
        assert [u.sent_bytes for u in ours.updates] == [u.sent_bytes for u in theirs.updates]


PLAIN: tuple[Strategy, ...] = (
    *(st.DiLoCo(interval=k, outer_lr=1.0, outer_momentum=0.0, worker="node") for k in (1, 3, 100)),
    st.DiLoCo(interval=4, fragments=2, outer_lr=1.0, outer_momentum=0.0, worker="node"),
    st.LocalSGD(rate=0.3, worker="node"),
)
"""An outer step that takes the mean: nothing but synchronous training happens on a lone node."""


@pytest.mark.parametrize("strategy", PLAIN, ids=repr)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_lone_node_trains_synchronously_to_the_bit(world_size: int, strategy: Strategy) -> None:
    """Equal weights of two or four ranks are powers of two, by which equal replicas are averaged without rounding."""
    options = st.Options(bucket_bytes=4096, clip_norm=CLIP_NORM, allow_unused=True)
    case = Case(lengths=(24,), branch="some", settle=False, options=options)
    expected = run(dataclasses.replace(case, strategy=st.DDP()), world_size, world_size)
    found = run(dataclasses.replace(case, strategy=strategy), world_size, world_size)
    for ours, theirs in zip(found, expected, strict=True):
        assert same(ours.final, theirs.final)
        assert len(ours.shown) == len(theirs.shown)
        assert [pair for pair in zip(ours.shown, theirs.shown, strict=True) if not same(*pair)] == []
        norms = [[update.gradient_norm for update in one.updates] for one in (ours, theirs)]
        assert norms[0] == pytest.approx(norms[1], rel=NORM_ROUNDING, abs=0)


@pytest.mark.parametrize("strategy", PLAIN, ids=repr)
def test_a_lone_node_of_unequal_ranks_trains_synchronously_but_for_rounding(strategy: Strategy) -> None:
    """Σ fl(θ·s) of equal θ is within 3 roundings of θ: some 1e-16, at each of a few averages of float64 values."""
    case = Case(lengths=(24,), tokens=True, dtype=torch.float64, settle=False)
    expected = run(dataclasses.replace(case, strategy=st.DDP()), 3, 3)[0]
    found = run(dataclasses.replace(case, strategy=strategy), 3, 3)[0]
    for ours, theirs in zip(found.final, expected.final, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


TOGETHER = (
    st.DiLoCo(interval=3, worker="node"),
    st.DiLoCo(interval=4, delay=2, mix=0.5, worker="node"),
    st.LocalSGD(rate=0.5, worker="node"),
)


def shown(
    rank: int, group: distributed.ProcessGroup, strategy: Strategy, wire: str, together: int, **nodes: Any
) -> list[Tensor]:
    """The matrix after every update, where a rank has the micro-batches of so many."""
    model = matrix()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options = st.Options(bucket_bytes=1024, wire=wire, **nodes)
    parallel = st.DataParallel(
        model, optimizer, strategy, micro_batches=together, group=group, options=options
    )
    found = []
    for step in range(11):
        for number in range(rank * together, (rank + 1) * together):
            parallel.backward((model(batch(number, step)) - 1).square().mean())
        found.append(model.weight.detach().clone())
    parallel.finish()
    return [*found, model.weight.detach().clone()]


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int4"])
@pytest.mark.parametrize("strategy", TOGETHER, ids=repr)
def test_two_nodes_of_two_are_two_ranks_with_the_micro_batches_of_a_node(
    strategy: Strategy, wire: str
) -> None:
    """To the bit: a sum of two has one order, and shares of a quarter add up to a half without rounding."""
    nodes = VirtualCluster(4).run(lambda rank, group: shown(rank, group, strategy, wire, 1, ranks_per_node=2))
    ranks = VirtualCluster(2).run(lambda rank, group: shown(rank, group, of_ranks(strategy), wire, 2))
    for rank, found in enumerate(nodes.values):
        assert unequal(found, ranks.values[rank // 2]) == []
    assert not torch.equal(nodes.values[0][0], nodes.values[2][0])
