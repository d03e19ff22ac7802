"""Loaders that begin anew by themselves, raise, or are fed inside each other: every batch once, or a word at once."""

import dataclasses
import random
import threading
from collections.abc import Callable, Iterator
from operator import attrgetter, itemgetter
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import stretto
from stretto import LocalSGD
from stretto.errors import ConfigError, Finished, OutOfTurn, PeerFailed
from stretto.feed.passes import own_tensors
from stretto.strategies import STRATEGIES, Strategy
from stretto_lab.virtual import VirtualCluster
from tests.draws import draws, part
from tests.loops.habits import job
from tests.processes import run_ranks

STRATEGIES_TRIED: tuple[Strategy, ...] = (*(kind() for kind in STRATEGIES.values()), LocalSGD(0.5))


class Restarting:
    """Its own iterator, which begins the next pass when it is asked after the end of one; it may say a length."""

    def __init__(self, count: int, says: int | None = None, fails: int | None = None) -> None:
        self.count, self.says, self.fails = count, says, fails
        self.passes = self.position = 0

    def __len__(self) -> int:
        if self.says is None:
            raise TypeError("no length")
        return self.says

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Tensor:
        if self.position == self.fails:
            raise ValueError("a bad sample")
        if self.position == self.count:
            self.passes, self.position = self.passes + 1, 0
            raise StopIteration
        self.position += 1
        return torch.full((1, 1), 100.0 * self.passes + self.position)


def train(
    rank: int, group: dist.ProcessGroup | None, strategy: Strategy, loader: Any, epochs: int, until: Any
) -> list[float]:
    parallel = job(nn.Linear(1, 1), strategy, group=group)
    seen: list[float] = []
    for _ in range(epochs):
        over(parallel, parallel.feed(loader, until=until), seen)
    parallel.finish()
    return seen


def over(parallel: stretto.DataParallel, batches: Iterator[Tensor], seen: list[float] | None = None) -> None:
    """Train on batches, and note them."""
    for batch in batches:
        if seen is not None:
            seen.append(float(batch))
        parallel.backward(parallel.model(batch).mean())


@pytest.mark.parametrize("seed", part(range(4)))
def test_a_loader_that_begins_anew_by_itself_gives_the_passes_of_a_plain_loop(seed: int) -> None:
    draw = random.Random(seed)
    for _ in draws(30):
        strategy, until = draw.choice(STRATEGIES_TRIED), draw.choice(["any", "all"])
        counts = [draw.randint(1, 5)] * draw.randint(1, 3)
        if until == "all":
            counts = [draw.randint(1, 5) for _ in counts]
        says = [draw.choice([count, None, draw.randint(0, 6)]) for count in counts]
        case = (strategy, until, counts, says)

        def program(rank: int, group: dist.ProcessGroup) -> list[float]:
            loader = Restarting(counts[rank], says[rank])  # noqa: B023  # run at once
            return train(rank, group, strategy, loader, 3, until)  # noqa: B023  # run at once

        for rank, seen in enumerate(VirtualCluster(len(counts)).run(program).values):
            plain = Restarting(counts[rank])
            assert seen == [float(batch) for _ in range(3) for batch in plain], case


def test_batches_before_an_error_of_the_loader_are_trained_whatever_its_length() -> None:
    draw = random.Random(0)
    for _ in range(100):
        strategy, fails = draw.choice(STRATEGIES_TRIED), draw.randint(1, 5)
        loader = Restarting(6, draw.choice([None, fails, fails + 1, draw.randint(0, 6)]), fails)
        parallel, seen = job(nn.Linear(1, 1), strategy), list[float]()
        with pytest.raises(ValueError, match="a bad sample"):
            over(parallel, parallel.feed(loader), seen)
        assert seen == [1.0 + index for index in range(fails)], (strategy, loader.says)
        over(parallel, parallel.feed([torch.ones(1, 1)] * 2))  # a rank by itself may catch it, and go on
        parallel.finish()
        assert parallel.steps == (fails + 2 + 1) // 2 or strategy.name == "acco"


def fails_on_one(rank: int, strategy: Strategy, says: int | None) -> tuple[str, str]:
    """Catch what comes out of the loop, and use the job again."""
    parallel = job(nn.Linear(1, 1), strategy)
    loader = Restarting(9, says, 4) if rank == 1 else Restarting(9)
    try:
        over(parallel, parallel.feed(loader))
    except (ValueError, PeerFailed) as error:
        told = f"{type(error).__name__}: {error}"
    try:
        next(iter(parallel.feed([1])))
    except Finished as error:
        return told, str(error)
    return told, "goes on"


@pytest.mark.parametrize("says", [None, 4])
@pytest.mark.parametrize("name", ["zero1", "acco", "local"])
def test_where_the_loader_of_one_rank_raises_the_others_are_told_at_once(name: str, says: int | None) -> None:
    """Although the loop catches the error, and although `timeout_seconds` is ten minutes."""
    (told, _), (cause, after) = run_ranks(2, fails_on_one, STRATEGIES[name](), says, timeout_seconds=120)
    assert cause == "ValueError: a bad sample"
    assert told.startswith("PeerFailed: rank 0")
    assert "rank 1, after step" in told
    assert "ValueError: a bad sample" in told
    assert "a bad sample" in after


@pytest.mark.parametrize("is_zipped", [False, True])
def test_a_feed_inside_a_feed_is_told(is_zipped: bool) -> None:
    parallel, batches = job(nn.Linear(1, 1)), [torch.ones(1, 1)] * 3

    def nested() -> Iterator[Tensor]:
        for batch in parallel.feed(batches):
            yield batch
            yield from parallel.feed(batches)

    pairs = zip(parallel.feed(batches), parallel.feed(batches), strict=True)
    with pytest.raises(OutOfTurn, match="another feed"):
        over(parallel, (one for one, _ in pairs) if is_zipped else nested())


def test_a_feed_that_was_dropped_leaves_the_next_one_alone() -> None:
    parallel, batches = job(nn.Linear(1, 1), micro_batches=1), [torch.ones(1, 1)] * 3
    model = parallel.model
    dropped = parallel.feed(batches)
    parallel.backward(model(next(dropped)).mean())
    seen = 0
    for batch in parallel.feed(batches):
        seen += 1
        dropped.close()
        state = parallel.feeding.pass_state()
        assert state is not None
        assert not state["is_left"]
        parallel.backward(model(batch).mean())
    parallel.finish()
    assert (seen, parallel.steps) == (3, 4)


@pytest.mark.parametrize("loader", [None, 5, lambda: [], nn.Linear])
def test_what_is_no_iterable_is_refused(loader: Any) -> None:
    with pytest.raises(ConfigError, match="expected an iterable of batches"):
        next(iter(job(nn.Linear(1, 1)).feed(loader)))


class Attributes(dict[str, Any]):
    """A dictionary that asks itself for any attribute, and says so in its own way."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Slotted:
    __slots__ = ("part",)

    def __init__(self, part: Any) -> None:
        self.part = part


class Locked(list[Any]):
    """Holds what cannot be copied, and perhaps itself."""

    def __init__(self, part: Any) -> None:
        self.part, self.lock, self.generator = part, threading.Lock(), (number for number in range(3))
        self.append(part)


@dataclasses.dataclass(frozen=True)
class Frozen:
    part: Any


KINDS: dict[type[Any], tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    dict: (lambda part: {"part": part, 1: None}, itemgetter("part")),
    Attributes: (lambda part: Attributes(part=part), itemgetter("part")),
    Slotted: (Slotted, attrgetter("part")),
    Locked: (Locked, attrgetter("part")),
    Frozen: (Frozen, attrgetter("part")),
    tuple: (lambda part: (None, part), itemgetter(1)),
    set: (lambda part: {part}, lambda one: next(iter(one))),
}
"""How something is put into a batch, and taken out again."""


def test_a_batch_of_any_make_has_memory_of_its_own_where_the_loader_is_asked_again() -> None:
    draw = random.Random(0)
    for _ in range(200):
        batch = memory = draw.choice([torch.zeros(2), np.zeros(2)])
        kinds: list[type[Any]] = []
        for _ in range(draw.randint(1, 3)):
            kinds.append(
                draw.choice([kind for kind in KINDS if kind is not set or isinstance(batch, Tensor)])
            )
            batch = KINDS[kinds[-1]][0](batch)
            if kinds[-1] is Locked and draw.random() < 0.3:
                batch.append(batch)
        inside = own = own_tensors(batch)
        assert type(own) is type(batch)
        memory += 1
        for kind in reversed(kinds):
            inside = KINDS[kind][1](inside)
        assert (inside == 0).all()
