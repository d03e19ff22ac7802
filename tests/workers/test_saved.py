"""A job of replicas is taken over by other workers, fragments, strategies and ranks: they begin with the mean."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed

import stretto as st
from stretto import checkpoint
from stretto.strategies import Strategy
from stretto_lab.virtual import VirtualCluster
from tests.diloco.jobs import Course, go_on, start

NODES = {"ranks_per_node": 2}
DELAYED = st.DiLoCo(interval=4, delay=2, mix=0.25, worker="node")
OTHERS = st.DiLoCo(interval=4, delay=2, mix=0.25)
DROPPED, NOTHING = "what each rank has stepped alone since the last average dropped", ""


def options_of(strategy: Strategy) -> dict[str, int]:
    return NODES if getattr(strategy, "worker", "rank") == "node" else {}


def saved(rank: int, group: distributed.ProcessGroup, strategy: Strategy, place: Path) -> Tensor:
    """Save after update 5, and return the mean of all replicas."""
    parallel = start(rank, group, strategy, options=options_of(strategy))
    go_on(parallel, range(5), Course([], [], [], 0, parallel))
    if isinstance(strategy, st.PAFTSync):
        parallel.job.sharded.masters[0].add_(0.01 * rank)  # replicas that should be alike, and are not
    checkpoint.save(parallel, place)
    with parallel.settled():
        return parallel.model.weight.detach().clone()


def loaded(
    rank: int, group: distributed.ProcessGroup, strategy: Strategy, place: Path
) -> tuple[Tensor, tuple[str, ...], list[Tensor], Tensor]:
    """What ranks begin with, what they are told, their anchors and velocities, and what they hold at the end."""
    parallel = start(rank, group, strategy, options=options_of(strategy))
    notes = checkpoint.load(parallel, place).notes
    begun = parallel.model.weight.detach().clone()
    state = []
    if strategy == OTHERS:
        (fragment,) = parallel.job.replica.fragments
        anchor = torch.cat([view.clone() for view in fragment.anchor_by_bucket])
        state = [anchor[: begun.numel()].view_as(begun), *(part.clone() for part in fragment.velocity)]
    go_on(parallel, range(5, 9), Course([], [], [], 0, parallel))
    parallel.finish()
    return begun, notes, state, parallel.model.weight.detach().clone()


@pytest.mark.parametrize(
    ("before", "after", "ranks", "told"),
    [
        (DELAYED, OTHERS, (4, 4), DROPPED),
        (OTHERS, DELAYED, (4, 4), DROPPED),
        (DELAYED, DELAYED, (4, 2), DROPPED),
        (DELAYED, DELAYED, (4, 6), DROPPED),
        (OTHERS, OTHERS, (2, 3), DROPPED),
        (st.DiLoCo(6, fragments=3), st.DiLoCo(6, fragments=2), (2, 2), DROPPED),  # of the same six buckets
        (st.LocalSGD(rate=0.25), st.DDP(), (2, 2), DROPPED),
        *((st.PAFTSync(interval=4), after, (2, 2), NOTHING)
          for after in (st.DDP(), st.PAFTDyn(), st.LocalSGD(0.5), OTHERS)),
        (st.PAFTSync(interval=4), st.DDP(), (3, 2), NOTHING),
    ],
    ids=str,
)  # fmt: skip
def test_other_jobs_begin_with_the_mean(
    before: Strategy, after: Strategy, ranks: tuple[int, int], told: str, tmp_path: Path
) -> None:
    saving, loading = map(VirtualCluster, ranks)
    means = saving.run(lambda rank, group: saved(rank, group, before, tmp_path)).values
    found = loading.run(lambda rank, group: loaded(rank, group, after, tmp_path)).values
    for begun, notes, state, final in found:
        assert torch.equal(begun, means[0])
        assert torch.equal(final, found[0][3])
        if told:
            assert told in notes[-1]
        if (state and before != after) or (state and ranks[0] != ranks[1]):
            anchor, *velocity = state
            assert torch.equal(anchor, begun)
            assert not any(part.any() for part in velocity)


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
    assert [mean for _, mean in found if not torch.equal(mean, expected)] == []
