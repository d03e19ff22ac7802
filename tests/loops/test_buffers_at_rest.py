"""What is written to a buffer stays, is saved and is what an evaluation sees, at whatever moment it is written."""

import dataclasses
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto import (
    ACCO,
    DDP,
    DPU,
    DiLoCo,
    LocalSGD,
    Options,
    PAFTDyn,
    PAFTSync,
    WeightPrediction,
    ZeRO1,
    checkpoint,
)
from stretto.strategies import Strategy
from stretto_lab.virtual import VirtualCluster

STRATEGIES: tuple[Strategy, ...] = (
    ZeRO1(),
    DDP(),
    ACCO(),
    DPU(),
    WeightPrediction(),
    LocalSGD(0.5),
    LocalSGD(0.3, state=True),
    PAFTDyn(),
    PAFTSync(2, overlap=True),
    DiLoCo(2),
    DiLoCo(4, fragments=2, delay=1),
)
WAYS: dict[str, Any] = {
    "lerp_": lambda one, other: one.lerp_(other, 0.5),
    "copy_": lambda one, other: one.copy_(one / 2 + other / 2),
    ".data": lambda one, other: one.data.mul_(0.5).add_(other, alpha=0.5),
    ".numpy()": lambda one, other: one.numpy().__setitem__(0, float(other[1])),
    "a row": lambda one, other: one[:2].copy_(other[:2]),
    "a view": lambda one, other: one.view(2, -1)[1].add_(other[0]),
}
KEEPING = list(WAYS)
"""Ways that keep the shape with which a new job begins."""
EVERY_WAY = [*WAYS, "load_state_dict", "another tensor", "a longer one"]
MOMENTS = ("on_update", "loop", "after feed", "inside settled()", "before save", "after finish")
CHOICES = ("mean", "rank0", "alone")


class Noted(nn.Module):
    """A layer, a normalization, and a buffer that nobody reads, and that nobody writes but its user."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("note", torch.zeros(4))

    def forward(self, input: Tensor) -> Tensor:
        return (self.norm(self.layer(input)) - 1).square().mean()


def write(model: nn.Module, way: str, number: int) -> None:
    other = torch.randn(model.note.numel(), generator=torch.Generator().manual_seed(number))
    if way == "load_state_dict":
        model.load_state_dict({"note": other}, strict=False)
    elif way == "another tensor":
        model.note = model.note + other
    elif way == "a longer one":
        model.note = torch.cat([model.note, other])
    else:
        WAYS[way](model.note, other)


@dataclasses.dataclass(frozen=True)
class Case:
    """A training on any number of ranks, which write a buffer at some moments in some ways."""

    strategy: Strategy
    seed: int
    batches: int
    passes: int
    moment: str
    choice: str
    ways: tuple[str | None, ...]
    """By moment; None for one at which nobody writes."""
    apart: bool = False
    """Whether each rank writes values of its own."""

    @classmethod
    def drawn(cls, draws: random.Random, strategy: Strategy, ways: Sequence[str] = EVERY_WAY) -> "Case":
        return cls(
            strategy,
            seed=draws.randrange(100),
            batches=draws.randint(1, 9),
            passes=draws.randint(1, 2),
            moment=draws.choice(MOMENTS),
            choice=draws.choice(CHOICES),
            ways=tuple(draws.choice([None, *ways]) if draws.random() < 0.7 else None for _ in range(24)),
        )


class Job:
    """One rank's."""

    def __init__(self, case: Case, rank: int, group: Any, folder: Path) -> None:
        self.case, self.rank, self.folder = case, rank, folder
        self.model, self.plain = Noted(), Noted()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        options = Options(buffers=f"note={case.choice}")
        self.parallel = stretto.DataParallel(
            self.model, optimizer, case.strategy, micro_batches=2, group=group, options=options
        )
        self.moments = 0
        self.loader = Batches(case, rank)
        self.saved: dict[int, tuple[Path, int, Tensor]] = {}
        """By step: where, moments until then, and what the buffer was."""

    def write(self) -> None:
        way, number = self.case.ways[self.moments], self.moments + 100 * self.rank * self.case.apart
        self.moments += 1
        if way is not None:
            write(self.plain, way, number)
            write(self.model, way, number)

    def look(self) -> None:
        with self.parallel.settled():
            assert torch.equal(self.model.note, self.plain.note), self.case

    def save(self) -> None:
        path = checkpoint.save(self.parallel, self.folder, loader=self.loader, keep=100)
        self.saved[self.parallel.steps] = path, self.moments, self.plain.note.clone()

    def heard(self, _: object) -> None:
        if self.case.moment == "inside settled()":
            with self.parallel.settled():
                self.write()
        elif self.case.moment in ("on_update", "before save"):
            self.write()
        if self.case.moment == "before save":
            self.save()
        if not self.case.apart:
            self.look()

    def train(self) -> "Job":
        while self.loader.passes_left:
            for batch in self.parallel.feed(self.loader, on_update=self.heard):
                if self.parallel.backward(self.model(batch)) and self.case.moment == "loop":
                    self.write()
            if self.case.moment == "after feed":
                self.write()
        self.parallel.finish()
        if self.case.moment == "after finish":
            self.write()
        return self

    def others(self) -> dict[str, Tensor]:
        """Return all that nobody has written."""
        return {name: value for name, value in self.model.state_dict().items() if name != "note"}


class Batches:
    """Batches of one rank for some passes, with a position that can be saved."""

    def __init__(self, case: Case, rank: int) -> None:
        self._generator = torch.Generator().manual_seed(100 * case.seed + rank)
        self.passes_left, self._length, self._position = case.passes, case.batches, 0

    def __iter__(self) -> Iterator[Tensor]:
        while self._position < self._length:
            self._position += 1
            yield torch.randn(4, 3, generator=self._generator)
        self._position = 0
        self.passes_left -= 1

    def state_dict(self) -> dict[str, Any]:
        return {"random": self._generator.get_state(), "position": self._position, "left": self.passes_left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["random"])
        self._position, self.passes_left = state["position"], state["left"]


def trained(case: Case, ranks: int, folder: Path) -> list[Job]:
    return list(VirtualCluster(ranks).run(lambda rank, group: Job(case, rank, group, folder).train()).values)


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_what_all_ranks_write_to_a_buffer_stays_and_is_shown_and_saved(
    strategy: Strategy, ranks: int, tmp_path: Path
) -> None:
    """To the bit, because the mean of what is equal is exact; and all else is what it is if nobody writes."""
    draws = random.Random(f"{strategy} on {ranks}")
    for number in range(6):
        case = Case.drawn(draws, strategy)
        silent = dataclasses.replace(case, ways=(None,) * len(case.ways))
        jobs = trained(case, ranks, tmp_path / str(number))
        for job, other in zip(jobs, trained(silent, ranks, tmp_path / "silent"), strict=True):
            assert torch.equal(job.model.note, job.plain.note), case
            for path, _, written in job.saved.values():
                assert torch.equal(note_in(path), written), case
            assert [
                (name, value)
                for name, value in job.others().items()
                if not torch.equal(value, other.others()[name])
            ] == [], case


def note_in(path: Path) -> Tensor:
    found = checkpoint.read(path)["model"]["note"]
    assert isinstance(found, Tensor)
    return found


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_a_job_saved_after_a_write_goes_on_to_the_bit(strategy: Strategy, tmp_path: Path) -> None:
    """Also where each rank has written something else."""
    draws = random.Random(f"{strategy} goes on")
    for number in range(3):
        case = dataclasses.replace(
            Case.drawn(draws, strategy, KEEPING), moment="before save", apart=True, batches=8, passes=1
        )
        jobs = trained(case, 2, tmp_path / str(number))
        step = draws.choice([*jobs[0].saved])

        def goes_on(rank: int, group: Any, case: Case = case, step: int = step, jobs: Any = jobs) -> Job:
            path, moments, _ = jobs[rank].saved[step]
            job = Job(case, rank, group, path.with_suffix(".again"))
            checkpoint.load(job.parallel, path, loader=job.loader)
            job.moments = moments
            return job.train()

        for job, again in zip(jobs, VirtualCluster(2).run(goes_on).values, strict=True):
            assert torch.equal(job.model.note, again.model.note), (case, step)
            assert [
                (k, value) for k, value in job.others().items() if not torch.equal(value, again.others()[k])
            ] == [], case


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_what_each_rank_writes_at_the_end_becomes_what_the_choice_for_the_buffer_says(
    strategy: Strategy, tmp_path: Path
) -> None:
    draws = random.Random(f"{strategy} apart")
    for number in range(5):
        moment, ways = (
            draws.choice(["on_update", "after feed", "inside settled()"]),
            draws.choices(("copy_",), k=1),
        )
        case = dataclasses.replace(
            Case.drawn(draws, strategy), moment=moment, apart=True, passes=1, ways=ways * 24, batches=6
        )
        jobs = trained(case, 2, tmp_path / str(number))
        mean = (jobs[0].plain.note + jobs[1].plain.note) / 2
        for job in jobs:
            expected = {"mean": mean, "rank0": jobs[0].plain.note, "alone": job.plain.note}[case.choice]
            torch.testing.assert_close(job.model.note, expected), case
