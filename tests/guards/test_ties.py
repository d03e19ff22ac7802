"""Between two replicas that differ, what can be computed again says which one is right."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import stretto as st
from stretto.errors import PeerFailed, ReplicasDiverged
from stretto.optimizer import digests_of
from stretto.records import Incident
from stretto_lab.faults import Fault, FaultPlan, strike_memory
from stretto_lab.faults.injector import Injector
from stretto_lab.virtual import VirtualCluster, VirtualGroup
from tests.guards.watched import Job, same

STRUCK = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """What became of one rank."""

    final: list[Tensor]
    incidents: list[Incident]
    error: Exception | None


def trained(
    guard: st.Guard, *faults: Fault, ranks: int = 2, damage: Callable[[Any], None] | None = None
) -> list[Seen]:
    """Train with a replicated optimizer; `damage` is called with rank 1's owner after each of its steps."""

    def train(rank: int, group: VirtualGroup) -> Seen:
        injector = Injector(FaultPlan(faults), rank)
        job = Job(st.DDP(), rank, group=group, guards=(guard,))
        strike_memory(job.parallel, injector)
        owner: Any = job.parallel.job.sharded
        if damage is not None and rank == STRUCK:
            step = owner.optimizer.step
            owner.optimizer.step = lambda: (step(), damage(owner))
        incidents: list[Incident] = []
        error = None
        try:
            incidents = [incident for update in job.run() for incident in update.incidents]
        except (ReplicasDiverged, PeerFailed) as raised:
            error = raised
        return Seen(final=job.final(), incidents=incidents, error=error)

    return list(VirtualCluster(ranks).run(train).values)


def at_third_step(damage: Callable[[Any], None]) -> Callable[[Any], None]:
    calls = [0]

    def strike(owner: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            damage(owner)

    return strike


def flip_moment(owner: Any) -> None:
    owner.optimizer.state[owner.segments[0].master]["exp_avg"].view(torch.int32)[4] ^= 1 << 20


def flip_step_count(owner: Any) -> None:
    owner.optimizer.state[owner.segments[0].master]["step"] += 1


CLEAN = trained(st.ReplicaGuard())[0].final
STEP = Fault(site="step", rank=STRUCK, instant=2, extent="chunk", chunk_bytes=64, pattern="word")
PUBLISHED = Fault(
    site="published values", rank=STRUCK, instant=2, extent="chunk", chunk_bytes=64, pattern="word"
)


def test_values_that_follow_from_masters_that_agree_are_told_apart_without_more() -> None:
    for seen in trained(st.ReplicaGuard(), PUBLISHED):
        (incident,) = seen.incidents
        assert (incident.site, incident.ranks, incident.action) == (
            "values to be shown",
            (STRUCK,),
            "copied from rank 0",
        )
        assert same(seen.final, CLEAN)


def test_a_step_that_went_wrong_is_named_and_repaired_between_two_ranks() -> None:
    for seen in trained(st.ReplicaGuard(recompute=True), STEP):
        assert {incident.ranks for incident in seen.incidents} == {(STRUCK,)}
        assert {incident.site for incident in seen.incidents} == {"masters", "values to be shown"}
        assert same(seen.final, CLEAN)


@pytest.mark.parametrize("damage", [flip_moment, flip_step_count])
def test_so_is_optimizer_state(damage: Callable[[Any], None]) -> None:
    for seen in trained(st.ReplicaGuard(recompute=True), damage=at_third_step(damage)):
        assert [(one.site, one.ranks) for one in seen.incidents] == [("optimizer state", (STRUCK,))]
        assert same(seen.final, CLEAN)


def test_without_it_two_ranks_end_with_an_error_that_says_what_would_help() -> None:
    error = trained(st.ReplicaGuard(), STEP)[0].error
    assert isinstance(error, ReplicasDiverged)
    assert "ReplicaGuard(recompute=True)" in str(error)


def test_a_rank_that_is_wrong_in_the_same_way_twice_cannot_be_told_from_the_other() -> None:
    def train(rank: int, group: VirtualGroup) -> Exception | None:
        job = Job(st.DDP(), rank, group=group, guards=(st.ReplicaGuard(recompute=True),))
        owner: Any = job.parallel.job.sharded
        for optimizer in (owner.optimizer, owner._ghost) if rank == STRUCK else ():
            optimizer.register_step_post_hook(
                lambda stepped, *_: stepped.param_groups[0]["params"][0].data[3].add_(1)
            )
        try:
            job.run()
        except (ReplicasDiverged, PeerFailed) as error:
            return error
        return None

    assert isinstance(VirtualCluster(2).run(train).values[0], ReplicasDiverged)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adagrad", "RMSprop", "NAdam"])
def test_a_rehearsal_says_what_the_step_leaves_and_changes_nothing(optimizer: str) -> None:
    def train(rank: int, group: VirtualGroup, guard: st.Guard) -> tuple[list[Tensor], int]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))
        kind: Any = getattr(torch.optim, optimizer)
        parallel = st.DataParallel(
            model, kind(model.parameters(), lr=0.01), st.DDP(), micro_batches=2, group=group, guards=(guard,)
        )
        owner = parallel.job.sharded
        differing = 0
        for _ in range(8):
            if parallel.backward(model(torch.randn(3, 6)).square().mean()) and guard.rehearses_step:
                differing += parallel.job.sharded.rehearsed != digests_of(owner)
        parallel.finish()
        return [parameter.detach().clone() for parameter in model.parameters()], differing

    plain, rehearsed = (
        VirtualCluster(2).run(lambda rank, group, guard=guard: train(rank, group, guard)).values[0]
        for guard in (st.ReplicaGuard(), st.ReplicaGuard(recompute=True))
    )
    assert same(plain[0], rehearsed[0])
    assert rehearsed[1] == 0
