"""One door for a job at rest: through memory and through files a job goes on alike, under any other settings."""

import dataclasses
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto as st
from stretto import checkpoint
from stretto.checkpoint import Held
from stretto.share import read_share
from stretto.survive.copies import Copies
from stretto.survive.folder import Folder
from stretto.survive.generations import Memory
from stretto_lab.virtual import VirtualCluster
from tests.draws import seeds

STRATEGIES = (
    st.ZeRO1(),
    st.DDP(),
    st.ACCO(),
    st.WeightPrediction(),
    st.DPU(),
    st.LocalSGD(0.4),
    st.DiLoCo(interval=3),
    st.DiLoCo(interval=4, fragments=2, delay=1),
    st.PAFTSync(interval=2),
    st.PAFTSync(interval=2, overlap=True),
)
WIRES = ("fp32", "fp32", "bf16", "int8", "int4")
END = 12
"""Updates in all."""
Outcome = tuple[dict[str, torch.Tensor], list[dict[str, Any]]]


TIMES = ("seconds", "lane_seconds", "exposed_seconds", "wait_seconds", "sent_bytes")
"""Fields of an update that may differ between equal runs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One job; the same on all ranks."""

    strategy: Any
    ranks: int = 2
    length: int = 20
    """Batches of each rank."""
    guards: Any = ()
    options: st.Options = dataclasses.field(default_factory=lambda: st.Options(bucket_bytes=256))
    updates: int | None = None


class Batches:
    """Batches of one rank, with a position that can be saved."""

    def __init__(self, rank: int, length: int) -> None:
        self.rank, self.length, self.position = rank, length, 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < self.length:
            self.position += 1
            seed = 1000 * self.rank + self.position
            yield torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch[:, :2]).square().mean()


class Job:
    """One rank's job."""

    def __init__(self, case: Case, rank: int = 0, group: Any = None) -> None:
        torch.manual_seed(0)
        self.case = case
        self.model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Dropout(0.1), nn.Linear(9, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, foreach=True)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=100)
        self.parallel = st.DataParallel(
            self.model,
            self.optimizer,
            case.strategy,
            micro_batches=2,
            scheduler=self.scheduler,
            guards=case.guards,
            group=group,
            options=case.options,
        )
        self.batches = Batches(rank, case.length)
        torch.manual_seed(100 + rank)
        self.updates: list[st.Update] = []

    def feed(self, updates: int | None, on_update: Callable[[st.Update], None] | None = None) -> None:
        for batch in self.parallel.feed(self.batches, updates, on_update=on_update or self.updates.append):
            self.parallel.micro_batch(lambda one: loss_of(self.model, one), batch)

    def train(self) -> "Job":
        with self.parallel:
            self.feed(self.case.updates)
            self.updates += self.parallel.finish()
        return self

    def holds(self) -> dict[str, Tensor]:
        """Return the model, and this rank's masters with their state."""
        owner = self.parallel.job.sharded
        states = [owner.optimizer.state.get(segment.master, {}) for segment in owner.segments]
        found = {**self.model.state_dict(), **{f"master {i}": one for i, one in enumerate(owner.masters)}}
        found |= {f"{key} of {i}": value for i, state in enumerate(states) for key, value in state.items()}
        return {name: value.detach().clone() for name, value in found.items()}

    def told(self) -> list[dict[str, Any]]:
        """Return the updates without what may differ between equal runs."""
        return [{k: v for k, v in one.as_json().items() if k not in TIMES} for one in self.updates]


def differing(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """Return the names under which two jobs hold different bits."""
    return sorted(
        k
        for k in left.keys() | right.keys()
        if k not in left or k not in right or not torch.equal(left[k], right[k])
    )


@dataclasses.dataclass(frozen=True)
class Change:
    """A job under `first` that goes on under `second` after some updates."""

    first: Case
    second: Case
    step: int

    @classmethod
    def drawn(cls, seed: int) -> "Change":
        chance = random.Random(seed)
        ranks, guards = chance.randint(1, 3), chance.choice([(), (), "standard"])
        first, second = (
            Case(
                strategy=chance.choice(STRATEGIES), ranks=ranks, length=40, guards=guards,
                options=st.Options(bucket_bytes=256, wire=chance.choice(WIRES)),
            )
            for _ in range(2)
        )  # fmt: skip
        return cls(first, second, step=chance.randint(1, 8))


def outcome(job: Job) -> Outcome:
    job.parallel.finish()
    return job.holds(), job.told()


Way = Callable[[Job, Path, Callable[[], st.DataParallel]], st.DataParallel]
"""Carries the state of a job, which has not ended, into another one."""


def files(job: Job, folder: Path, begin: Callable[[], st.DataParallel], **how: Any) -> st.DataParallel:
    checkpoint.save(job.parallel, folder, loader=job.batches, **how)
    job.parallel.finish()
    following = begin()
    checkpoint.load(following, folder, loader=job.batches)
    return following


def beside_training(job: Job, folder: Path, begin: Callable[[], st.DataParallel]) -> st.DataParallel:
    return files(job, folder, begin, async_save=True)


def memory(job: Job, _: Path, begin: Callable[[], st.DataParallel]) -> st.DataParallel:
    return checkpoint.continued(job.parallel, begin, loader=job.batches)


def another_process(job: Job, _: Path, begin: Callable[[], st.DataParallel]) -> st.DataParallel:
    held = pickle.dumps(checkpoint.hold(job.parallel, loader=job.batches))
    job.parallel.finish()
    following = begin()
    checkpoint.load(following, [pickle.loads(held)], loader=job.batches)
    return following


def a_connection(job: Job, _: Path, begin: Callable[[], st.DataParallel]) -> st.DataParallel:
    content = bytes(checkpoint.hold(job.parallel, loader=job.batches).written().joined())
    job.parallel.finish()
    following = begin()
    checkpoint.load(following, [read_share(content, "a share")], loader=job.batches)
    return following


def a_machine(job: Job, folder: Path, begin: Callable[[], st.DataParallel]) -> st.DataParallel:
    folder.mkdir(mode=0o700, exist_ok=True)
    own = Memory("a machine", is_first=True, folder=Folder(folder))
    own.keep(job.parallel, Copies(job.parallel, job.parallel.job.everyone.group), None, loader=job.batches)
    job.parallel.finish()
    following = begin()
    found = Memory("a machine", is_first=True, folder=Folder(folder))
    copies = Copies(following, following.job.everyone.group)
    assert found.load(following, copies, loader=job.batches) is not None
    return following


CARRIERS: tuple[Way, ...] = (beside_training, memory, another_process, a_connection, a_machine)


def carried(way: Way, change: Change, rank: int, group: Any, folder: Path) -> Outcome:
    """Train, and go on under the other settings over the same model, from a state that is carried in a way."""
    job, case = Job(change.first, rank, group), change.second
    job.feed(change.step)

    def begin() -> st.DataParallel:
        return st.DataParallel(
            job.model, job.optimizer, case.strategy, micro_batches=2, scheduler=job.scheduler,
            guards=case.guards, group=group, options=case.options,
        )  # fmt: skip

    job.parallel, job.updates = way(job, folder, begin), []
    job.feed(END)
    return outcome(job)


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("seed", seeds(12))
def test_whatever_carries_a_state_a_job_goes_on_from_it_alike(seed: int, tmp_path: Path) -> None:
    change = Change.drawn(seed)

    def ends(way: Way) -> Sequence[Outcome]:
        folder = tmp_path / way.__name__
        return (
            VirtualCluster(change.first.ranks)
            .run(lambda rank, group: carried(way, change, rank, group, folder))
            .values
        )

    expected = ends(files)
    for way in CARRIERS:
        for (held, told), (as_files, told_of_files) in zip(ends(way), expected, strict=True):
            assert differing(held, as_files) == [], (way.__name__, change)
            assert told == told_of_files, (way.__name__, change)


def held_by(case: Case, step: int, folder: Path) -> Sequence[Held]:
    """Train, and return what all ranks hold after an update; the same state lies in `folder`."""
    found: dict[int, bytes] = {}

    def program(rank: int, group: Any) -> None:
        job = Job(case, rank, group)

        def heard(update: st.Update) -> None:
            if update.step == step:
                found[rank] = pickle.dumps(checkpoint.hold(job.parallel, loader=job.batches, extra=[rank]))
                checkpoint.save(job.parallel, folder, loader=job.batches, extra=[rank])

        job.feed(case.updates, heard)
        job.parallel.finish()

    VirtualCluster(case.ranks).run(program)
    return [pickle.loads(found[rank]) for rank in range(case.ranks)]


@pytest.mark.long(keep=1)
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
        header = shares[0].header._replace(optimizer="torch.optim.SGD")
        shares = [dataclasses.replace(one, header=header) for one in shares]
    before = job.holds()
    with pytest.raises(st.errors.ForeignCheckpoint):
        checkpoint.load(job.parallel, shares)
    assert differing(before, job.holds()) == []
    assert job.train().updates


def test_what_is_held_stays_as_it_is_while_the_job_continues() -> None:
    job = Job(Case(strategy=st.DDP(), updates=4, ranks=1))
    found: list[tuple[Held, str]] = []

    def heard(update: st.Update) -> None:
        held = checkpoint.hold(job.parallel)
        found.append((held, held.written().digest))

    job.feed(4, heard)
    assert [held.written().digest for held, _ in found] == [before for _, before in found]


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


@pytest.mark.parametrize("after", ["int4", "fp32", "rotated2"])
def test_rounding_errors_end_with_a_wire_that_keeps_them_and_that_is_told(after: str, tmp_path: Path) -> None:
    case = Case(strategy=st.ZeRO1(), updates=4, options=st.Options(bucket_bytes=256, wire="int8"))
    shares = held_by(case, 3, tmp_path)
    other = dataclasses.replace(case, options=st.Options(bucket_bytes=256, wire=after))

    def program(rank: int, group: Any, *, from_files: bool) -> tuple[bool, tuple[str, ...]]:
        job = Job(other, rank, group)
        restored = checkpoint.load(job.parallel, tmp_path if from_files else [shares[rank]])
        notes = tuple(note for note in restored.notes if "wire" in note)  # it was saved amid a pass, too
        keeps = any(bool(residuals.any()) for residuals in job.parallel.job.exchange.residuals)
        return keeps, notes

    dropped = (
        f"saved on a wire that keeps rounding errors, resumed on {after} under zero1: errors that ranks had not "
        "sent yet are dropped"
    )
    expected = (True, ()) if after == "int4" else (False, (dropped,))
    for way in (True, False):
        found = VirtualCluster(2).run(lambda rank, group, way=way: program(rank, group, from_files=way))
        assert found.values == (expected,) * 2
