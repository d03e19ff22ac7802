"""A job of nodes is taken over by other workers and strategies, and watched by guards."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed

import stretto as st
from stretto import checkpoint
from stretto.strategies import Strategy
from stretto_lab.virtual import VirtualCluster
from tests.diloco.jobs import UPDATES, Course, go_on, on_cluster, start

NODES = {"ranks_per_node": 2}
DELAYED = st.DiLoCo(interval=4, delay=2, mix=0.25, worker="node")
LOCAL = st.LocalSGD(rate=0.25, state=True, worker="node")


def saved(rank: int, group: distributed.ProcessGroup, strategy: Strategy, place: Path) -> Tensor:
    """Save after update 5, and return the mean of all replicas."""
    parallel = start(rank, group, strategy, options=NODES)
    go_on(parallel, range(5), Course([], [], [], 0, parallel))
    checkpoint.save(parallel, place)
    with parallel.settled():
        return parallel.model.weight.detach().clone()


def loaded(
    rank: int, group: distributed.ProcessGroup, strategy: Strategy, place: Path
) -> tuple[Tensor, tuple[str, ...], Tensor]:
    """What ranks begin with, what they are told, and what they hold at the end."""
    parallel = start(rank, group, strategy, options=NODES)
    notes = checkpoint.load(parallel, place).notes
    begun = parallel.model.weight.detach().clone()
    go_on(parallel, range(5, 8), Course([], [], [], 0, parallel))
    parallel.finish()
    return begun, notes, parallel.model.weight.detach().clone()


OTHERS = st.DiLoCo(interval=4, delay=2, mix=0.25)


@pytest.mark.parametrize(
    ("before", "after", "ranks"),
    [(DELAYED, OTHERS, 4), (OTHERS, DELAYED, 4), (DELAYED, DELAYED, 2), (DELAYED, DELAYED, 6)],
    ids=["nodes to ranks", "ranks to nodes", "fewer nodes", "more nodes"],
)
def test_other_workers_begin_with_the_mean(
    before: Strategy, after: Strategy, ranks: int, tmp_path: Path
) -> None:
    means = VirtualCluster(4).run(lambda rank, group: saved(rank, group, before, tmp_path)).values
    found = VirtualCluster(ranks).run(lambda rank, group: loaded(rank, group, after, tmp_path)).values
    for begun, notes, final in found:
        assert torch.equal(begun, means[0])
        assert "what each rank has stepped alone since the last average dropped" in notes[-1]
        assert torch.equal(final, found[0][2])


def test_settled_shows_the_mean_of_the_nodes_on_all_ranks() -> None:
    def program(rank: int, group: distributed.ProcessGroup) -> tuple[Tensor, Tensor]:
        parallel = start(rank, group, DELAYED, options=NODES)
        for step in range(3):
            parallel.backward((parallel.model.weight * (step + rank)).square().mean())
        with parallel.settled():
            mean = parallel.model.weight.detach().clone()
        return parallel.model.weight.detach().clone(), mean

    found = VirtualCluster(4).run(program).values
    expected = found[0][0] / 4 + found[1][0] / 4 + (found[2][0] / 4 + found[3][0] / 4)
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][0], found[2][0])
    assert all(torch.equal(mean, expected) for _, mean in found)


@pytest.mark.parametrize("strategy", [DELAYED, LOCAL], ids=repr)
def test_standard_guards_change_nothing_and_report_nothing(strategy: Strategy) -> None:
    bare = on_cluster(strategy, ranks=4, options=NODES)
    guarded = on_cluster(strategy, ranks=4, options=NODES, guards="standard")
    for expected, found in zip(bare, guarded, strict=True):
        assert all(map(torch.equal, expected.shown, found.shown))
        assert not any(update.incidents for update in found.updates)


def test_masters_that_change_at_rest_are_mended_and_the_node_stays_alike() -> None:
    clean = on_cluster(DELAYED, ranks=4, options=NODES)

    def program(rank: int, group: distributed.ProcessGroup) -> tuple[list[Tensor], set[tuple[str, ...]]]:
        guards = (st.ReplicaGuard(), st.AtRest())
        parallel = start(rank, group, DELAYED, options=NODES, guards=guards)
        course = Course([], [], [], 0, parallel)
        for step in range(UPDATES):
            go_on(parallel, range(step, step + 1), course)
            if (rank, step) == (1, 6):
                parallel.job.sharded.masters[0].view(torch.int32).data[5] ^= 1 << 29
        course.updates += parallel.finish()
        found = [incident for update in course.updates for incident in update.incidents]
        return course.shown, {(one.guard, one.site, str(one.ranks)) for one in found}

    for expected, (shown, incidents) in zip(clean, VirtualCluster(4).run(program).values, strict=True):
        assert incidents == {("rest", "masters", "(1,)")}
        assert all(map(torch.equal, expected.shown, shown))
