"""Notes are empty where the run that goes on equals the one that did not stop, and say why where it does not."""

import functools
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, Sampler

import stretto
from stretto import checkpoint
from stretto.errors import CheckpointError, ForeignCheckpoint, OutOfTurn
from stretto.groups import SoloGroup
from stretto.strategies import STRATEGIES
from stretto_lab.virtual import VirtualCluster
from tests.draws import draws

PER_EPOCH, EPOCHS = 6, 3


class Rows(Dataset[Tensor]):
    """Each row with noise of the process."""

    def __init__(self, rank: int) -> None:
        self.rows = torch.randn(2 * PER_EPOCH, 3, generator=torch.Generator().manual_seed(rank))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index] + 0.1 * torch.randn(3)


class Streamed(IterableDataset[Tensor]):
    def __init__(self, rank: int) -> None:
        self.rows = torch.randn(2 * PER_EPOCH, 3, generator=torch.Generator().manual_seed(rank))

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.rows)


class ByPass(Sampler[int]):
    """Another order in each pass of this process."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        order = list(range(2 * PER_EPOCH))
        random.Random(self.passes).shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return 2 * PER_EPOCH


class Loader:
    """Its batches in another order in each pass, and a state, behind the batch that was given last."""

    def __init__(self, rank: int) -> None:
        self.rank, self.passes, self.position, self.is_told = rank, 0, 0, False

    def __len__(self) -> int:
        return PER_EPOCH

    def __iter__(self) -> Iterator[Tensor]:
        if not self.is_told:
            self.passes, self.position = self.passes + 1, 0
        self.is_told = False
        while self.position < PER_EPOCH:
            self.position += 1
            yield torch.randn(2, 3, generator=torch.Generator().manual_seed(self.rank + 100 * self.position))

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.passes, self.position, self.is_told = state["passes"], state["position"], True


class Restarting(Loader):
    """As the loader of `torchdata.nodes`: told a position at the end of a pass, it begins another one."""

    restart_on_stop_iteration = True
    __len__ = None  # type: ignore[assignment]  # it does not know its length

    def __iter__(self) -> Iterator[Tensor]:
        self.is_told &= self.position < PER_EPOCH or not self.restart_on_stop_iteration
        return super().__iter__()


LOADERS: dict[str, Callable[[int], Any]] = {
    "state": Loader,
    "restarting": Restarting,
    "plain": lambda rank: DataLoader(Rows(rank), 2),
    "shuffled": lambda rank: DataLoader(Rows(rank), 2, shuffle=True),
    "generator": lambda rank: DataLoader(
        Rows(rank), 2, shuffle=True, generator=torch.Generator().manual_seed(rank)
    ),
    "with replacement": lambda rank: DataLoader(
        Rows(rank), 2, sampler=RandomSampler(Rows(rank), True, generator=torch.Generator().manual_seed(5))
    ),
    "distributed": lambda rank: DataLoader(Rows(rank), 2, sampler=DistributedSampler(Rows(rank), 1, 0)),
    "by pass": lambda rank: DataLoader(list(Streamed(rank)), 2, sampler=ByPass()),
    "streamed": lambda rank: DataLoader(Streamed(rank), 2),
    "workers": lambda rank: DataLoader(Rows(rank), 2, num_workers=1),
    "workers, shuffled": lambda rank: DataLoader(
        Rows(rank), 2, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "workers, streamed": lambda rank: DataLoader(Streamed(rank), 2, num_workers=1),
    "list": lambda rank: list(Streamed(rank).rows.split(2)),
}


def job(group: dist.ProcessGroup | None, strategy: str, schedule: str = "LinearLR") -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = {
        "LinearLR": lambda: lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20),
        "CosineAnnealingLR": lambda: lr_scheduler.CosineAnnealingLR(optimizer, 20),
        "SequentialLR": lambda: lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.LinearLR(optimizer)], [3]
        ),
        "warm, then cosine": lambda: lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 9)], [3]
        ),
        "several": lambda: [lr_scheduler.LinearLR(optimizer), lr_scheduler.LinearLR(optimizer)],
    }[schedule]()
    kind = STRATEGIES[strategy]()
    return model, stretto.DataParallel(
        model, optimizer, kind, micro_batches=2, scheduler=scheduler, group=group
    )


def run(
    rank: int,
    group: dist.ProcessGroup,
    strategy: str,
    *,
    kind: str,
    at: int,
    saves: bool,
    loads: bool,
    ahead: bool,
    fed: bool,
    folder: Path,
) -> Any:
    def train(first: int, goes_on: bool) -> Any:
        for epoch in range(first, EPOCHS):

            def note(update: stretto.Update, epoch: int = epoch) -> None:
                if update.step == at and not goes_on:
                    checkpoint.save(parallel, folder, loader=loader if saves else None, extra=epoch)

            if kind == "distributed":
                loader.sampler.set_epoch(epoch)
            batches = iter(parallel.feed(loader, on_update=note) if fed else loader)
            batch = next(batches, None)
            while batch is not None:
                loss = model(batch).square().mean()
                following = next(batches, None) if ahead else None
                update = parallel.backward(loss)
                if update is not None and not fed:
                    note(update)
                batch = following if ahead else next(batches, None)
        parallel.finish()
        return parallel.steps, model[0].weight.detach().clone()

    loader = LOADERS[kind](rank)
    is_saved = saves and (fed or hasattr(loader, "state_dict"))
    loads, saves = loads and (fed or is_saved), is_saved
    model, parallel = job(group, strategy)
    whole = train(0, False)
    loader = LOADERS[kind](rank)
    model, parallel = job(group, strategy)
    restored = checkpoint.load(parallel, folder, loader=loader if loads else None)
    first = restored.extra if saves and loads else restored.step * 2 // PER_EPOCH
    again = train(first, True)
    return whole[0] == again[0] and torch.equal(whole[1], again[1]), restored.notes, restored.is_pass_over


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_notes_are_empty_exactly_where_the_run_that_goes_on_equals_the_other(
    strategy: str, tmp_path: Path
) -> None:
    for seed in draws(24, 6):
        draw = random.Random(f"{strategy} {seed}")
        case = {
            "kind": draw.choice([kind for kind in LOADERS if "workers" not in kind]),
            "at": draw.randrange(1, EPOCHS * PER_EPOCH // 2),
            "saves": draw.random() < 0.7,
            "loads": draw.random() < 0.8,
            "ahead": draw.random() < 0.3,
            "fed": draw.random() < 0.8,
        }
        if case["kind"] == "restarting":  # without its state nobody knows whether that pass was over
            case |= {"saves": True, "loads": True}
        program = functools.partial(run, strategy=strategy, folder=tmp_path / str(seed), **case)
        for is_same, notes, is_pass_over in VirtualCluster(draw.randint(1, 2)).run(program).values:
            assert is_same or notes, f"{strategy} {case}: another run, and no note"
            is_known = (
                case["fed"] and not is_pass_over
            )  # nobody knows where a loop of one's own was in its data
            assert not is_same or not notes or not is_known, f"{strategy} {case}: the same run, and {notes}"


@pytest.mark.parametrize("fed", [True, False])
def test_notes_are_as_right_where_other_processes_read_the_data(fed: bool, tmp_path: Path) -> None:
    """Alone in its process: workers are forked."""
    for seed in draws(12):
        draw = random.Random(seed)
        case = {"kind": draw.choice(["workers", "workers, shuffled", "workers, streamed"]), "fed": fed}
        case |= {"at": draw.randrange(1, 9), "saves": draw.random() < 0.8, "loads": draw.random() < 0.9}
        strategy, case["ahead"] = draw.choice(["zero1", "acco"]), draw.random() < 0.3
        is_same, notes, is_over = run(0, SoloGroup(), strategy, folder=tmp_path / str(seed), **case)
        assert is_same or notes, f"{strategy} {case}: another run, and no note"
        assert not is_same or not notes or is_over or not fed, f"{strategy} {case}: the same run, and {notes}"


def test_a_schedule_of_another_kind_is_refused_in_words(tmp_path: Path) -> None:
    _, parallel = job(None, "zero1", "SequentialLR")
    checkpoint.save(parallel, tmp_path)
    for other, found in {
        "CosineAnnealingLR": "CosineAnnealingLR",
        "warm, then cosine": r"SequentialLR\(LinearLR, CosineAnnealingLR\)",
        "several": r"SeveralSchedulers\(LinearLR, LinearLR\)",
    }.items():
        _, following = job(None, "zero1", other)
        with pytest.raises(
            ForeignCheckpoint, match=rf"of SequentialLR\(LinearLR, LinearLR\), expected {found}"
        ):
            checkpoint.load(following, tmp_path)
        assert following.steps == 0


def test_a_loop_that_counts_its_epochs_by_the_step_can_ask_whether_a_pass_is_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, parallel = job(None, "zero1")
    loader = Loader(0)

    def save(update: stretto.Update) -> None:
        if update.step == PER_EPOCH // 2:
            checkpoint.save(parallel, tmp_path, loader=loader)

    for batch in parallel.feed(loader, on_update=save):
        parallel.backward(model(batch).square().mean())
    model, parallel = job(None, "zero1")
    loader = Loader(0)
    with caplog.at_level(logging.WARNING, "stretto"):
        restored = checkpoint.load(parallel, tmp_path, loader=loader)
    assert restored.is_pass_over
    (note,) = restored.notes
    assert "computes its epoch from the step" in note
    assert note in caplog.text
    assert list(parallel.feed(loader)) == []


def test_a_loader_without_a_state_is_the_one_that_was_fed_and_has_the_data_that_were_saved(
    tmp_path: Path,
) -> None:
    model, parallel = job(None, "zero1")
    rows = [torch.ones(2, 3)] * 8
    for batch in parallel.feed(rows):
        if parallel.backward(model(batch).square().mean()) is not None and parallel.steps == 2:
            checkpoint.save(parallel, tmp_path, loader=rows)
            with pytest.raises(CheckpointError, match="give feed\\(\\) this very loader"):
                checkpoint.save(parallel, tmp_path, loader=rows[:])
    for other, told in ((rows[:3], "ended before batch 4"), (Loader(0), "expected a loader like the one")):
        with pytest.raises(CheckpointError, match=told):
            checkpoint.load(job(None, "zero1")[1], tmp_path, loader=other)
    model, parallel = job(None, "zero1")
    checkpoint.load(parallel, tmp_path, loader=rows)
    with pytest.raises(OutOfTurn, match="expected the loader that load\\(\\) was given"):
        next(iter(parallel.feed(rows[:])))
