"""A pass over any loader gives every batch once, whatever its length is said to be, and is gone on from to the bit."""

import dataclasses
import functools
import itertools
import multiprocessing
import random
from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import DataLoader

import stretto
from stretto import ACCO, Average, Bernoulli, EchoLoader, Even, LocalSGD, checkpoint
from stretto.echo import Plan
from stretto.engine import Clock
from stretto.strategies import STRATEGIES, DiLoCo, PAFTSync, Strategy
from stretto.strategies.ledger import ledger_of
from stretto_lab.virtual import Compute, VirtualCluster, parse_network
from tests.draws import draws, part, seeds

JOBS: tuple[Strategy, ...] = (
    *(kind() for kind in STRATEGIES.values()),
    LocalSGD(0.5, state=True),
    LocalSGD(0.5),
    LocalSGD(0.3, "bernoulli", max_gap=4),
    DiLoCo(interval=4, fragments=2, delay=1, mix=0.5),
    DiLoCo(interval=3, fragments=3, mix=0.25),
    Average(every=3, fragments=1, delay=2),
    PAFTSync(interval=2, overlap=True),
)
ALONE = [strategy for strategy in JOBS if ledger_of(strategy).local]
"""Ranks step by themselves, and meet now and then."""
ENDLESS = 1000
"""More batches than any run takes."""
WORKERS = multiprocessing.get_context("forkserver")
"""Ranks are threads here. A process that is forked while others run may inherit a lock that nobody gives back; a server
that has no other threads forks safely."""
WORKERS.set_forkserver_preload(["torch.utils.data"])


@dataclasses.dataclass
class Record:
    """A batch as an object."""

    x: Tensor


WRAPS: tuple[Callable[[Tensor], Any], ...] = (
    lambda x: x,
    lambda x: {"x": x},
    Record,
    lambda x: UserDict(x=x),
    lambda x: SimpleNamespace(part=Record(x), rest=[]),
)
"""What a loader may put its tensors into."""


def number_of(batch: Any) -> Tensor:
    """Return the tensor in what a loader gave."""
    if isinstance(batch, Tensor):
        return batch
    if isinstance(batch, SimpleNamespace):
        batch = batch.part
    x: Tensor = batch.x if isinstance(batch, Record) else batch["x"]
    return x


class Numbered:
    """Gives `count` batches per pass, in another order in each, and says of its length what it is told to say.

    As PyTorch's stateful loaders: a state after the last batch has an empty rest, one after the end begins a pass.
    """

    def __init__(
        self, count: int, rank: int, says: object, *, reuses: bool = False, workers: int = 0, wrap: int = 0
    ) -> None:
        self.count, self.rank, self.says, self.workers = count, rank, says, workers
        self.epoch = self.position = 0
        self.is_restored = False
        self.ends = 0
        """How often it was asked after its last batch."""
        self.memory = torch.zeros(2, 3) if reuses else None
        self.wrap = WRAPS[wrap]

    def __len__(self) -> int:
        if isinstance(self.says, int):
            return self.says
        # A new one each time: one that the case kept would hold the frames it was raised through, and with them a job.
        raise type(self.says)(*self.says.args) if isinstance(self.says, Exception) else TypeError("no length")

    def __iter__(self) -> Iterator[Any]:
        if not self.is_restored:
            self.epoch, self.position = self.epoch + (self.position > 0), 0
        self.is_restored = False
        return self._rest()

    def _rest(self) -> Iterator[Any]:
        order = torch.randperm(self.count, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        context = WORKERS if self.workers else None
        rest: Any = order[self.position :]
        batches: DataLoader[int] = DataLoader(
            rest, batch_size=None, num_workers=self.workers, multiprocessing_context=context
        )
        for index in batches:
            self.position += 1
            number = float(1000 * self.rank + 100 * self.epoch + index)
            batch = torch.full((2, 3), number) if self.memory is None else self.memory.fill_(number)
            yield self.wrap(batch)
            if self.memory is not None:
                self.memory.fill_(-1)
        self.ends += 1
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]
        self.is_restored = True


@dataclasses.dataclass(frozen=True)
class Case:
    """One job."""

    strategy: Strategy
    counts: tuple[int, ...]
    """Batches of each rank in a pass."""
    says: tuple[object, ...]
    """What each rank's loader says of that."""
    until: Any
    micro_batches: int | Clock
    epochs: int
    updates: int | None
    """After which the only epoch ends, where the loaders do not."""
    save_at: int
    """The update in which a checkpoint is saved, or the epoch."""
    saves_behind: bool
    """Whether it is the epoch, behind its loop."""
    plan: Plan | None
    """When to echo; None for the bare loader."""
    rate: float
    """Learning rate; at zero no use may follow another."""
    reuses: bool
    """Whether the loader writes every batch into the same memory."""
    workers: int
    """Processes that read for the loader: none or one."""
    wrap: int
    """Which of `WRAPS` its batches are."""


def drawn(draw: random.Random) -> Case:
    world_size = draw.randint(1, 3)
    alike = draw.randint(1, 6)
    strategy = draw.choice(JOBS)
    saves_behind = draw.random() < 0.3
    counts = tuple(draw.choice((alike, draw.randint(1, 6))) for _ in range(world_size))
    errors = (ValueError("undefined"), RuntimeError("unknown"), AttributeError("none"), None)
    says = tuple(draw.choice((count, count, draw.randint(0, 9), draw.choice(errors))) for count in counts)
    is_endless = draw.random() < 0.2
    least = 2 if isinstance(strategy, ACCO) else 1
    micro_batches: int | Clock = draw.randint(least, 3)
    if strategy.overlaps and draw.random() < 0.25:
        micro_batches = Clock(minimum=draw.randint(1, 2), maximum=draw.randint(2, 4))
    counts = (ENDLESS,) * world_size if is_endless else counts
    save_at = draw.randint(1, 3 if saves_behind else 9)
    if strategy in ALONE and not saves_behind and len(set(counts)) > 1:
        # They save together at updates that all of them come to. An echo makes more of them.
        save_at = draw.randint(1, -(-min(counts) // micro_batches))
    return Case(
        strategy,
        counts,
        says,
        until=draw.choice(("any", "all")),
        micro_batches=micro_batches,
        epochs=1 if is_endless else draw.randint(1, 3),
        updates=draw.randint(1, 9) if is_endless else None,
        save_at=save_at,
        saves_behind=saves_behind,
        plan=draw.choice((None, None, Even(2), Even(1.5), Bernoulli(0.5, 3))),
        rate=draw.choice((0.05, 0.05, 0.05, 0)),
        reuses=draw.random() < 0.3,
        workers=draw.choice((0,) * 11 + (1,)),
        wrap=draw.randrange(len(WRAPS)),
    )


@dataclasses.dataclass(frozen=True)
class Run:
    """What one rank saw."""

    seen: list[float]
    passes: list[int]
    """How many batches had been seen at the end of each pass."""
    ends: int
    steps: int
    weight: Tensor
    saved: tuple[int, int] | None
    """The number of batches seen, and the epoch, when the checkpoint was saved."""
    told: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    """Number, gap and samples of the updates that it was told of."""


def train(rank: int, group: dist.ProcessGroup, case: Case, folder: Path, resume: bool = False) -> Run:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=case.rate, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    parallel = stretto.DataParallel(
        model, optimizer, case.strategy, scheduler=scheduler, micro_batches=case.micro_batches, group=group
    )
    bare = Numbered(
        case.counts[rank],
        rank,
        case.says[rank],
        reuses=case.reuses,
        workers=case.workers,
        wrap=case.wrap,
    )
    loader: Any = bare if case.plan is None else EchoLoader(bare, case.plan)
    seen: list[float] = []
    passes: list[int] = []
    saved: list[tuple[int, int]] = []
    epoch = 0
    if resume:
        epoch = checkpoint.load(parallel, folder, loader=loader).extra

    def save(reached: int) -> None:
        if reached == case.save_at and not resume:
            checkpoint.save(parallel, folder, loader=loader, extra=epoch)
            saved.append((len(seen), epoch))

    told: list[tuple[int, int, int]] = []

    def on_update(update: stretto.Update) -> None:
        told.append((update.step, update.gap, update.samples))
        if not case.saves_behind:
            save(update.step)

    while epoch < case.epochs:
        for batch in parallel.feed(loader, updates=case.updates, until=case.until, on_update=on_update):
            number = number_of(batch)
            seen.append(float(number[0, 0]))
            parallel.backward((model(number / 1000) - 1).square().mean())
        passes.append(len(seen))
        epoch += 1
        if case.saves_behind:
            save(epoch)
    parallel.finish()
    weight = model.weight.detach()
    return Run(seen, passes, bare.ends, parallel.steps, weight, saved[0] if saved else None, told)


def expect_passes(case: Case, rank: int, run: Run) -> None:
    """Compare fresh batches with what a plain loop sees that leaves its passes after as many; echoes repeat them."""
    bare = Numbered(case.counts[rank], rank, None)
    ends_alike = len(set(case.counts)) == 1
    for start, end in itertools.pairwise([0, *run.passes]):
        batches = iter(bare)
        seen = run.seen[start:end]
        fresh = seen if case.plan is None else list(dict.fromkeys(seen))
        assert fresh == [float(batch[0, 0]) for batch in itertools.islice(batches, len(fresh))], case
        if case.updates is None and (case.until == "all" or ends_alike):
            assert next(batches, None) is None, case
    if case.updates is not None:
        assert run.steps == case.updates, case
    elif case.until == "all" or len(case.counts) == 1:
        assert run.ends == case.epochs, case


def on_cluster(case: Case, folder: Path, **others: Any) -> list[Run]:
    network, compute = parse_network("1gbit,5ms"), Compute(micro_batch_ns=4_000_000)
    cluster = VirtualCluster(len(case.counts), network, compute)
    return list(cluster.run(functools.partial(train, case=case, folder=folder, **others)).values)


def check(case: Case, folder: Path) -> None:
    """Run a job whole, and again from its checkpoint if it has saved one."""
    whole = on_cluster(case, folder)
    assert len({run.steps for run in whole}) == 1, case
    for rank, run in enumerate(whole):
        assert torch.equal(run.weight, whole[0].weight), case
        expect_passes(case, rank, run)
    if any(run.saved is None for run in whole):
        return
    resumed = on_cluster(case, folder, resume=True)
    for rank, (before, after) in enumerate(zip(whole, resumed, strict=True)):
        assert before.saved is not None
        num_seen, epoch = before.saved
        if isinstance(
            case.micro_batches, Clock
        ):  # what a round holds, and where a pass is left, depends on time
            passes = [*before.passes[:epoch], *(num_seen + end for end in after.passes)]
            seen = [*before.seen[:num_seen], *after.seen]
            expect_passes(case, rank, dataclasses.replace(after, seen=seen, passes=passes, ends=before.ends))
            continue
        assert after.seen == before.seen[num_seen:], case
        assert after.steps == before.steps, case
        assert torch.equal(after.weight, before.weight), case


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("seed", seeds(8))
def test_every_batch_comes_once_all_end_together_and_a_checkpoint_goes_on_to_the_bit(
    seed: int, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    for number in draws(14):
        check(drawn(draw), tmp_path / str(number))


@pytest.mark.parametrize("seed", part(range(4)))
def test_a_rank_that_steps_alone_and_learns_late_of_an_end_trains_in_every_pass(
    seed: int, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    for _ in draws(25):
        case = dataclasses.replace(
            drawn(draw),
            strategy=draw.choice(ALONE),
            until="any",
            epochs=3,
            updates=None,
            save_at=99,
            workers=0,
        )
        counts = draw.choice(((draw.randint(1, 6),) * 3, tuple(draw.randint(1, 6) for _ in range(3))))
        case = dataclasses.replace(case, counts=counts, says=draw.choices([*counts, None, 9], k=3))
        for rank, run in enumerate(on_cluster(case, tmp_path)):
            expect_passes(case, rank, run)
            assert [
                (start, end) for start, end in itertools.pairwise([0, *run.passes]) if not end > start
            ] == [], case


@pytest.mark.parametrize("seed", part(range(4)))
def test_what_a_rank_knows_of_its_end_changes_nothing_where_ranks_step_alone(
    seed: int, tmp_path: Path
) -> None:
    """Nobody else knows it: what a rank did by it would meet the others in the middle of something else."""
    draw = random.Random(seed)
    for number in draws(12):
        case = dataclasses.replace(drawn(draw), strategy=draw.choice(ALONE), workers=0)
        if not case.saves_behind:  # of the first pass, in an update that all ranks come to
            case = dataclasses.replace(case, save_at=draw.randint(1, -(-min(case.counts) // 3)))
        others = [draw.choice((count, count + 1, 9, None)) for count in case.counts]
        first, second = (
            on_cluster(dataclasses.replace(case, says=says), tmp_path / f"{number} {index}")
            for index, says in enumerate((case.says, tuple(others)))
        )
        for one, other in zip(first, second, strict=True):
            assert (one.seen, one.passes, one.told) == (other.seen, other.passes, other.told), case
            assert torch.equal(one.weight, other.weight), case
