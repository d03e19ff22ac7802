"""What travels is looked after in checkpoints, is taken over by other jobs, and is watched by guards."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

import stretto as st
from stretto import checkpoint
from stretto.engine.replica_sync import SyncState
from stretto.records import Incident
from stretto_lab.virtual import VirtualCluster
from tests.bits import unequal
from tests.diloco.jobs import Course, go_on, on_cluster, start

STRATEGY = st.DiLoCo(interval=4, delay=2, mix=0.25)
SPLIT = st.DiLoCo(interval=4, fragments=2, delay=1)
BY_NODES = dataclasses.replace(STRATEGY, worker="node")


def ranks_for(strategy: st.DiLoCo | st.LocalSGD, wire: str = "fp32") -> dict[str, Any]:
    """How many ranks, and under which options."""
    is_node = strategy.worker == "node"
    return {"ranks": 4 if is_node else 3, "options": {"wire": wire, "ranks_per_node": 2 if is_node else None}}


@pytest.mark.parametrize("loads", [True, False], ids=["load", "save beside training"])
def test_checkpoints_talk_only_once_a_fragment_has_arrived(loads: bool, tmp_path: Path) -> None:
    """It leaves after update 4: there a job goes back to update 3, or ranks look after the files of that save."""

    def program(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        parallel = start(rank, group, STRATEGY)
        course = Course([], [], [], 0, parallel)
        go_on(parallel, range(3), course)
        checkpoint.save(parallel, tmp_path, async_save=not loads)
        go_on(parallel, range(3, 4), course)
        if loads:
            assert parallel.job.replica.sync.state is SyncState.PARTIAL
            assert checkpoint.load(parallel, tmp_path).step == 3
            go_on(parallel, range(3, 4), course)
        go_on(parallel, range(4, 7), course)
        parallel.finish()
        return [*course.shown[-4:], parallel.model.weight.detach().clone()]

    expected = on_cluster(STRATEGY, updates=7)
    for course, found in zip(expected, VirtualCluster(2).run(program).values, strict=True):
        assert unequal(course.shown[-5:], found) == []


def test_a_fragment_that_is_under_way_for_longer_than_a_new_delay_lands_at_once(tmp_path: Path) -> None:
    def save(rank: int, group: dist.ProcessGroup) -> None:
        parallel = start(rank, group, st.DiLoCo(8, delay=6))
        go_on(parallel, range(12), Course([], [], [], 0, parallel))
        checkpoint.save(parallel, tmp_path)
        parallel.finish()

    def load(rank: int, group: dist.ProcessGroup) -> list[int]:
        parallel = start(rank, group, st.DiLoCo(8, delay=2))
        checkpoint.load(parallel, tmp_path)
        course = Course([], [], [], 0, parallel)
        go_on(parallel, range(12, 15), course)
        parallel.finish()
        return [update.gap for update in course.updates[:3]]

    VirtualCluster(2).run(save)
    for gaps in VirtualCluster(2).run(load).values:
        assert gaps[0] == 0


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(
    "strategy",
    [
        *(STRATEGY, SPLIT, st.DiLoCo(interval=3), st.DiLoCo(interval=3, mix=0.5, nesterov=False)),
        *(BY_NODES, st.LocalSGD(rate=0.25, state=True, worker="node")),
        *(st.LocalSGD(rate=0.5), st.LocalSGD(rate=0.5, state=True)),
    ],
    ids=repr,
)
def test_standard_guards_change_nothing_and_report_nothing(strategy: st.Strategy) -> None:
    bare, guarded = (
        on_cluster(strategy, **ranks_for(strategy), guards=guards) for guards in ((), "standard")
    )
    for expected, found in zip(bare, guarded, strict=True):
        assert unequal(expected.shown, found.shown) == []
        assert not any(update.incidents for update in found.updates)


GUARDS = (st.ReplicaGuard(), st.AtRest())


def damaged(
    strategy: st.DiLoCo, behind: int, what: str, guards: tuple[st.Guard, ...] = GUARDS, wire: str = "fp32"
) -> list[tuple[list[torch.Tensor], list[Incident]]]:
    """Flip a bit of something on rank 1, after an update."""
    chosen = ranks_for(strategy, wire)

    def program(rank: int, group: dist.ProcessGroup) -> tuple[list[torch.Tensor], list[Incident]]:
        parallel = start(rank, group, strategy, guards=guards, options=chosen["options"])
        course = Course([], [], [], 0, parallel)
        for step in range(11):
            go_on(parallel, range(step, step + 1), course)
            if step + 1 == behind and rank == 1:
                fragment = parallel.job.replica.fragments[0]
                parallel.job.replica._arrive()
                targets = {
                    "anchor": fragment.anchor[0],
                    "velocity": fragment.velocity[0],
                    "masters": parallel.job.sharded.masters[0],
                    "owed": next(iter(fragment.exchange.residuals), None),
                    "lost": next(iter(fragment.lost), None),
                }
                targets[what].view(torch.int32).data[5] ^= 1 << 29
        course.updates += parallel.finish()
        found = [incident for update in course.updates for incident in update.incidents]
        shown = [*course.shown, parallel.model.weight.detach().clone()]
        return shown, [*found, *parallel.late_incidents]

    return list(VirtualCluster(chosen["ranks"]).run(program).values)


@pytest.mark.parametrize(
    ("what", "site", "strategy", "wire"),
    [
        *((what, what, STRATEGY, "fp32") for what in ("anchor", "velocity", "masters")),
        *((what, "error memory", STRATEGY, "int4") for what in ("owed", "lost")),
        ("masters", "masters", BY_NODES, "fp32"),
    ],
)
def test_what_changes_at_rest_is_named_and_mended(
    what: str, site: str, strategy: st.DiLoCo, wire: str
) -> None:
    clean = on_cluster(strategy, **ranks_for(strategy, wire))
    for expected, (shown, incidents) in zip(clean, damaged(strategy, 7, what, wire=wire), strict=True):
        assert {(one.guard, one.site, one.ranks) for one in incidents} == {("rest", site, (1,))}
        assert len(incidents) == 1 or strategy is BY_NODES
        assert unequal(expected.shown, shown) == []


def test_an_anchor_that_changes_on_its_way_is_copied_from_other_ranks_before_it_lands() -> None:
    """Behind update 5 the fragment is under way: nothing is sealed then."""
    clean = on_cluster(STRATEGY, ranks=3)
    for expected, (shown, incidents) in zip(clean, damaged(STRATEGY, 5, "anchor"), strict=True):
        found = {(incident.guard, incident.site, incident.ranks, incident.action) for incident in incidents}
        assert found == {("replica", "anchor", (1,), "copied from rank 0")}
        assert unequal(expected.shown, shown) == []


@pytest.mark.parametrize("what", ["anchor", "masters"])
def test_the_same_damage_does_harm_without_guards(what: str) -> None:
    clean, harmed = on_cluster(STRATEGY, ranks=3)[1], damaged(STRATEGY, 5, what, guards=())[1]
    assert not all(map(torch.equal, clean.shown, harmed[0]))
