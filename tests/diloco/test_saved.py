"""What travels is looked after in checkpoints, is taken over by other jobs, and is watched by guards."""

from pathlib import Path

import pytest
import torch
from torch import distributed as dist

import stretto as st
from stretto import checkpoint
from stretto.engine.agreed import Alike
from stretto.records import Incident
from stretto_lab.virtual import VirtualCluster
from tests.diloco.jobs import Course, go_on, on_cluster, start

STRATEGY = st.DiLoCo(interval=4, delay=2, mix=0.25)
SPLIT = st.DiLoCo(interval=4, fragments=2, delay=1)


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
            assert parallel.job.replica.agreement.state is Alike.APART
            assert checkpoint.load(parallel, tmp_path).step == 3
            go_on(parallel, range(3, 4), course)
        go_on(parallel, range(4, 7), course)
        parallel.finish()
        return [*course.shown[-4:], parallel.model.weight.detach().clone()]

    expected = on_cluster(STRATEGY, updates=7)
    for course, found in zip(expected, VirtualCluster(2).run(program).values, strict=True):
        assert all(map(torch.equal, course.shown[-5:], found))


def test_other_fragments_begin_with_the_mean_and_a_note(tmp_path: Path) -> None:
    """Six buckets: cut into three fragments or into two they have the same layout."""

    def save(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        parallel = start(rank, group, st.DiLoCo(6, fragments=3))
        go_on(parallel, range(5), Course([], [], [], 0, parallel))
        checkpoint.save(parallel, tmp_path)
        with parallel.settled():
            return parallel.model.weight.detach().clone()

    def load(rank: int, group: dist.ProcessGroup) -> tuple[tuple[str, ...], torch.Tensor]:
        parallel = start(rank, group, st.DiLoCo(6, fragments=2))
        notes = checkpoint.load(parallel, tmp_path).notes
        shown = parallel.model.weight.detach().clone()
        go_on(parallel, range(5, 9), Course([], [], [], 0, parallel))
        parallel.finish()
        return notes, shown

    means = VirtualCluster(2).run(save).values
    for notes, shown in VirtualCluster(2).run(load).values:
        assert len(notes) == 1
        assert torch.equal(shown, means[0])


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


@pytest.mark.parametrize("strategy", [st.DDP(), st.PAFTDyn(), st.LocalSGD(0.5), STRATEGY], ids=str)
def test_counts_of_another_kind_of_replica_are_left_where_they_are(
    strategy: st.Strategy, tmp_path: Path
) -> None:
    def save(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        parallel = start(rank, group, st.PAFTSync(interval=4))
        go_on(parallel, range(3), Course([], [], [], 0, parallel))
        checkpoint.save(parallel, tmp_path)
        parallel.finish()
        return parallel.model.weight.detach().clone()

    def load(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        parallel = start(rank, group, strategy)
        checkpoint.load(parallel, tmp_path)
        shown = parallel.model.weight.detach().clone()
        go_on(parallel, range(3, 5), Course([], [], [], 0, parallel))
        parallel.finish()
        return shown

    saved = VirtualCluster(2).run(save).values
    for shown in VirtualCluster(2).run(load).values:
        assert torch.equal(shown, saved[0])


def test_other_ranks_begin_with_the_mean_and_a_new_velocity(tmp_path: Path) -> None:
    def save(rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        parallel = start(rank, group, STRATEGY)
        go_on(parallel, range(5), Course([], [], [], 0, parallel))
        checkpoint.save(parallel, tmp_path)
        with parallel.settled():
            return parallel.model.weight.detach().clone()

    def load(rank: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, list[torch.Tensor]]:
        parallel = start(rank, group, STRATEGY)
        checkpoint.load(parallel, tmp_path)
        (fragment,) = parallel.job.replica.fragments
        anchor = torch.cat([view.clone() for view in fragment.anchor_by_bucket])
        shown = parallel.model.weight.detach().clone()
        return shown, [anchor[: shown.numel()].view_as(shown), *fragment.velocity]

    means = VirtualCluster(2).run(save).values
    for shown, (anchor, *velocity) in VirtualCluster(3).run(load).values:
        assert torch.equal(shown, means[0])
        assert torch.equal(anchor, shown)
        assert not any(part.any() for part in velocity)


@pytest.mark.parametrize(
    "strategy",
    [STRATEGY, SPLIT, st.DiLoCo(interval=3), st.DiLoCo(interval=3, mix=0.5, nesterov=False)],
    ids=repr,
)
def test_standard_guards_change_nothing_and_report_nothing(strategy: st.DiLoCo) -> None:
    bare, guarded = on_cluster(strategy, ranks=3), on_cluster(strategy, ranks=3, guards="standard")
    for expected, found in zip(bare, guarded, strict=True):
        assert all(map(torch.equal, expected.shown, found.shown))
        assert not any(update.incidents for update in found.updates)


GUARDS = (st.ReplicaGuard(), st.AtRest())


def damaged(
    strategy: st.DiLoCo, behind: int, what: str, guards: tuple[st.Guard, ...] = GUARDS, wire: str = "fp32"
) -> list[tuple[list[torch.Tensor], list[Incident]]]:
    """Flip a bit of something on rank 1, after an update."""

    def program(rank: int, group: dist.ProcessGroup) -> tuple[list[torch.Tensor], list[Incident]]:
        parallel = start(rank, group, strategy, guards=guards, options={"wire": wire})
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
                    "owed": next(iter(fragment.exchange.owed), None),
                    "lost": next(iter(fragment.lost), None),
                }
                targets[what].view(torch.int32).data[5] ^= 1 << 29
        course.updates += parallel.finish()
        found = [incident for update in course.updates for incident in update.incidents]
        return course.shown, [*found, *parallel.late_incidents]

    return list(VirtualCluster(3).run(program).values)


@pytest.mark.parametrize("what", ["anchor", "velocity", "masters"])
def test_what_changes_at_rest_is_named_and_mended(what: str) -> None:
    clean = on_cluster(STRATEGY, ranks=3)
    for expected, (shown, incidents) in zip(clean, damaged(STRATEGY, 7, what), strict=True):
        assert [(found.guard, found.site, found.ranks) for found in incidents] == [("rest", what, (1,))]
        assert all(map(torch.equal, expected.shown, shown))


@pytest.mark.parametrize("what", ["owed", "lost"])
def test_what_a_packed_wire_owes_or_has_lost_is_named_and_mended(what: str) -> None:
    clean = on_cluster(STRATEGY, ranks=3, options={"wire": "int4"})
    found = damaged(STRATEGY, 7, what, wire="int4")
    for expected, (shown, incidents) in zip(clean, found, strict=True):
        assert [(one.guard, one.site, one.ranks) for one in incidents] == [("rest", "error memory", (1,))]
        assert all(map(torch.equal, expected.shown, shown))


def test_an_anchor_that_changes_on_its_way_is_copied_from_other_ranks_before_it_lands() -> None:
    """Behind update 5 the fragment is under way: nothing is sealed then."""
    clean = on_cluster(STRATEGY, ranks=3)
    for expected, (shown, incidents) in zip(clean, damaged(STRATEGY, 5, "anchor"), strict=True):
        found = {(incident.guard, incident.site, incident.ranks, incident.action) for incident in incidents}
        assert found == {("replica", "anchor", (1,), "copied from rank 0")}
        assert all(map(torch.equal, expected.shown, shown))


@pytest.mark.parametrize("what", ["anchor", "masters"])
def test_the_same_damage_does_harm_without_guards(what: str) -> None:
    clean, harmed = on_cluster(STRATEGY, ranks=3)[1], damaged(STRATEGY, 5, what, guards=())[1]
    assert not all(map(torch.equal, clean.shown, harmed[0]))
