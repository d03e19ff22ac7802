"""One door for a job at rest: through memory and through files a job goes on alike, under any other settings."""

import dataclasses
import pickle
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import stretto as st
from stretto import checkpoint
from stretto.checkpoint import Held
from stretto_lab.virtual import VirtualCluster
from tests.switching.jobs import Case, Job, differing, loss_of
from tests.switching.test_boundaries import STRATEGIES, WIRES

END = 12
"""Updates in all."""
Outcome = tuple[dict[str, torch.Tensor], list[dict[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Change:
    """A job under `first` that goes on under `second` after some updates."""

    first: st.Phase
    second: st.Phase
    step: int
    ranks: int
    guards: Any

    def case(self, *phases: st.Phase) -> Case:
        """Return a case under one phase, or under both in turn; the layout is the same, whatever fragments need."""
        others = {0: phases[0], self.step: phases[-1], 10**6: self.first, 10**7: self.second}
        return Case(
            strategy=st.Switching(others), ranks=self.ranks, lengths=(40,), updates=END, guards=self.guards
        )

    @classmethod
    def drawn(cls, seed: int) -> "Change":
        chance = random.Random(seed)
        phases = [st.Phase(chance.choice(STRATEGIES), wire=chance.choice(WIRES)) for _ in range(2)]
        guards = chance.choice([(), (), "standard"])
        return cls(*phases, step=chance.randint(1, 8), ranks=chance.randint(1, 3), guards=guards)


def feed(job: Job, updates: int) -> None:
    for batch in job.parallel.feed(job.batches, updates, on_update=job.updates.append):
        job.parallel.micro_batch(lambda one: loss_of(job.model, one), batch)


def outcome(job: Job, step: int) -> Outcome:
    job.parallel.finish()
    return job.holds(), job.told()[step:]


def switched(change: Change, rank: int, group: Any) -> Outcome:
    job = Job(change.case(change.first, change.second), rank, group)
    feed(job, END)
    return outcome(job, change.step)


def through_memory(change: Change, rank: int, group: Any) -> Outcome:
    """Go on in another job over the same model, in the same process."""
    job = Job(change.case(change.first), rank, group)
    feed(job, change.step)

    def begin() -> st.DataParallel:
        case = change.case(change.second)
        return st.DataParallel(
            job.model, job.optimizer, case.strategy, micro_batches=case.micro_batches, scheduler=job.scheduler,
            guards=case.guards, group=group, options=case.options,
        )  # fmt: skip

    job.parallel = checkpoint.continued(job.parallel, begin, loader=job.batches)
    feed(job, END)
    return outcome(job, change.step)


def through_files(change: Change, rank: int, group: Any, folder: Path) -> Outcome:
    """Save, and go on in a job that knows nothing of the one before."""
    job = Job(change.case(change.first), rank, group)
    feed(job, change.step)
    checkpoint.save(job.parallel, folder, loader=job.batches)
    job.parallel.finish()
    other = Job(change.case(change.second), rank, group)
    checkpoint.load(other.parallel, folder, loader=other.batches)
    feed(other, END)
    return outcome(other, 0)


@pytest.mark.parametrize("seed", range(12))
def test_a_switch_and_the_door_through_memory_end_as_the_door_through_files(
    seed: int, tmp_path: Path
) -> None:
    change = Change.drawn(seed)
    ways = [
        VirtualCluster(change.ranks).run(program).values
        for program in (
            lambda rank, group: switched(change, rank, group),
            lambda rank, group: through_memory(change, rank, group),
            lambda rank, group: through_files(change, rank, group, tmp_path),
        )
    ]
    for (held, told), (others_held, others_told), (expected, expected_told) in zip(*ways, strict=True):
        assert (differing(held, expected), differing(others_held, expected)) == ([], []), change
        assert told == others_told == expected_told, change


def held_by(case: Case, step: int, folder: Path) -> Sequence[Held]:
    """Train, and return what all ranks hold after an update; the same state lies in `folder`."""
    found: dict[int, bytes] = {}

    def program(rank: int, group: Any) -> None:
        job = Job(case, rank, group)

        def heard(update: st.Update) -> None:
            if update.step == step:
                found[rank] = pickle.dumps(checkpoint.hold(job.parallel, loader=job.batches, extra=[rank]))
                checkpoint.save(job.parallel, folder, loader=job.batches, extra=[rank])

        for batch in job.parallel.feed(job.batches, case.updates, on_update=heard):
            job.parallel.micro_batch(lambda one: loss_of(job.model, one), batch)
        job.parallel.finish()

    VirtualCluster(case.ranks).run(program)
    return [pickle.loads(found[rank]) for rank in range(case.ranks)]


@pytest.mark.parametrize("ranks", [(2, 3), (3, 1)])
@pytest.mark.parametrize("strategy", STRATEGIES[:1] + STRATEGIES[2:9:2], ids=str)
def test_at_another_world_size_memory_and_files_bring_the_same(
    strategy: st.Strategy, ranks: tuple[int, int], tmp_path: Path
) -> None:
    before, after = ranks
    case = Case(strategy=strategy, ranks=before, updates=8, options=st.Options(bucket_bytes=256, wire="int8"))
    shares = held_by(case, 5, tmp_path)

    def program(rank: int, group: Any, *, from_files: bool) -> tuple[Outcome, Any, Any]:
        job = Job(dataclasses.replace(case, ranks=after), rank, group)
        source = tmp_path if from_files else list(shares[rank::after])  # of ranks that have left, or none
        restored = checkpoint.load(job.parallel, source, loader=job.batches)
        job.train()
        found = (job.holds(), job.told())
        return found, restored.notes, (restored.step, restored.extra, restored.loader_states)

    memory, files = (
        VirtualCluster(after).run(lambda rank, group, way=way: program(rank, group, from_files=way)).values
        for way in (False, True)
    )
    for ((held, told), *rest), ((expected, expected_told), *expected_rest) in zip(memory, files, strict=True):
        assert differing(held, expected) == []
        assert (told, rest) == (expected_told, expected_rest)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_share_of_a_sharded_state_is_told_on_all_ranks_and_changes_nothing(
    lost: int, tmp_path: Path
) -> None:
    case = Case(strategy=st.ZeRO1(), updates=4)
    shares = held_by(case, 3, tmp_path)

    def program(rank: int, group: Any) -> bool:
        job = Job(case, rank, group)
        before = job.holds()
        with pytest.raises(st.errors.TornCheckpoint, match="expected the shares of all ranks"):
            checkpoint.load(job.parallel, [] if rank == lost else [shares[rank]])
        return differing(before, job.holds()) == [] and bool(job.train().updates)

    assert VirtualCluster(2).run(program).values == (True, True)


@pytest.mark.parametrize("other", ["model", "optimizer"])
def test_a_state_of_another_model_or_optimizer_changes_nothing(other: str, tmp_path: Path) -> None:
    case = Case(strategy=st.DDP(), updates=4, ranks=1)
    shares = held_by(case, 3, tmp_path)
    job = Job(case)
    if other == "model":
        shares = [
            dataclasses.replace(one, entries={k: v for k, v in one.entries.items() if k != "model.0.bias"})
            for one in shares
        ]
    else:
        shares = [dataclasses.replace(one, optimizer="torch.optim.SGD") for one in shares]
    before = job.holds()
    with pytest.raises(st.errors.ForeignCheckpoint):
        checkpoint.load(job.parallel, shares)
    assert differing(before, job.holds()) == []
    assert job.train().updates


def test_shares_of_different_updates_are_told_apart(tmp_path: Path) -> None:
    case = Case(strategy=st.DDP(), updates=4)
    shares = [held_by(case, step, tmp_path / str(step))[rank] for rank, step in enumerate((2, 3))]

    def program(rank: int, group: Any) -> None:
        with pytest.raises(st.errors.CheckpointError, match="shares of one job at one update"):
            checkpoint.load(Job(case, rank, group).parallel, [shares[rank]])

    VirtualCluster(2).run(program)


@pytest.mark.parametrize("wires", [("bf16", "fp32"), ("int4", "bf16"), ("int4", "fp32")])
def test_a_job_that_publishes_in_another_format_shows_its_masters_in_that_one(
    wires: tuple[str, str], tmp_path: Path
) -> None:
    before, after = (
        Case(strategy=st.ZeRO1(), updates=4, options=st.Options(bucket_bytes=256, wire=wire))
        for wire in wires
    )
    shares = held_by(before, 3, tmp_path)

    def program(rank: int, group: Any, *, from_files: bool) -> bool:
        job = Job(after, rank, group)
        checkpoint.load(job.parallel, tmp_path if from_files else [shares[rank]])
        owner = job.parallel.job.sharded
        shown = [one.detach().reshape(-1) for one in job.parallel.job.model.parameters]
        return all(
            torch.equal(
                shown[piece.slot.index][piece.offset : piece.offset + piece.numel],
                owner.values(owner.masters, piece)
                .to(torch.bfloat16 if wires[1] == "bf16" else torch.float32)
                .float(),
            )
            for piece in owner.pieces
        )

    for way in (True, False):
        found = (
            VirtualCluster(2).run(lambda rank, group, way=way: program(rank, group, from_files=way)).values
        )
        assert found == (True, True)
