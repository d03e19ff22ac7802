"""Schedulers of every kind turn as in a plain loop, and what cannot be is told."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

import stretto
from stretto import checkpoint
from stretto.errors import CheckpointError, ConfigError, UsageError
from tests.draws import FIRST_SEED, draws
from tests.loops.habits import MICRO_BATCHES, OVERLAPPING, batches, mean_square, network, same, sgd

Make = Callable[[torch.optim.Optimizer], Any]
KINDS: dict[str, Make] = {
    "LambdaLR": lambda optimizer: schedulers.LambdaLR(optimizer, lambda step: 0.9**step),
    "OneCycleLR": lambda optimizer: schedulers.OneCycleLR(optimizer, 0.1, total_steps=4),
    "CyclicLR": lambda optimizer: schedulers.CyclicLR(optimizer, 0.01, 0.1, 2),
    "CosineAnnealingWarmRestarts": lambda optimizer: schedulers.CosineAnnealingWarmRestarts(optimizer, 2),
    "SequentialLR": lambda optimizer: schedulers.SequentialLR(
        optimizer, [schedulers.LinearLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)], [2]
    ),
    "ChainedScheduler": lambda optimizer: schedulers.ChainedScheduler(
        [schedulers.LinearLR(optimizer), schedulers.ExponentialLR(optimizer, 0.9)]
    ),
    "SWALR": lambda optimizer: SWALR(optimizer, 0.05, anneal_epochs=2),
}


def train(make: Make, strategy: stretto.Strategy | None = None, by_hand: bool = False) -> torch.nn.Module:
    model = network()
    optimizer = sgd(model)
    scheduler = make(optimizer)
    parallel = stretto.DataParallel(
        model, optimizer, strategy, scheduler=scheduler, micro_batches=MICRO_BATCHES
    )
    for batch in parallel.feed(batches()):
        if parallel.backward(mean_square(model, batch)) and by_hand:
            scheduler.step()
    parallel.finish()
    return model


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_schedule_turns_as_in_a_plain_loop(make: Make) -> None:
    model = network()
    optimizer = sgd(model)
    scheduler = make(optimizer)
    for index, batch in enumerate(batches()):
        (mean_square(model, batch) / MICRO_BATCHES).backward()
        if index % MICRO_BATCHES == 1:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    assert same(train(make), model)


@pytest.mark.parametrize("strategy", [stretto.ZeRO1(), *OVERLAPPING], ids=lambda strategy: strategy.name)
def test_a_schedule_that_ends_before_the_run_is_told(strategy: stretto.Strategy) -> None:
    with pytest.raises(
        UsageError, match=r"rank 0, after step 4: .* total steps is 3.*feed\(loader, updates=N\)"
    ):
        train(lambda optimizer: schedulers.OneCycleLR(optimizer, 0.1, total_steps=3), strategy)


def test_a_schedule_that_is_turned_by_hand_too_is_told() -> None:
    with pytest.raises(UsageError, match=r"is at 2, and Stretto had stepped it to 1: .*scheduler\.step\(\)"):
        train(KINDS["LambdaLR"], by_hand=True)


class Wrapped:
    """A schedule around another one, which it turns several times at each step, as Accelerate's does."""

    def __init__(self, scheduler: Any, turns: int) -> None:
        self.scheduler, self.turns = scheduler, turns

    def step(self, *args: Any) -> None:
        for _ in range(self.turns):
            self.scheduler.step(*args)


class Asking:
    """A schedule that has to be told something."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, epoch: int, *, metric: float, scale: float = 1.0) -> None:
        raise AssertionError("nobody can call this")


def test_any_schedule_is_turned_exactly_once_or_the_first_update_says_that_it_was_not() -> None:
    draw = random.Random(FIRST_SEED)
    for _ in draws(100):
        kinds = [draw.choice(list(KINDS.values())) for _ in range(draw.randint(1, 3))]
        turns, depth = draw.choice([1, 1, 2, 3]), draw.randrange(3)

        def make(optimizer: torch.optim.Optimizer) -> Any:
            made = [kind(optimizer) for kind in kinds]  # noqa: B023  # called at once
            for _ in range(depth):  # noqa: B023  # called at once
                made[-1] = Wrapped(made[-1], 1)
            made[-1] = Wrapped(made[-1], turns) if turns > 1 else made[-1]  # noqa: B023  # called at once
            return made if len(made) > 1 else made[0]

        if turns == 1:
            train(make)
        else:
            with pytest.raises(UsageError, match=rf"1 step\(\) of the scheduler moved it from 0 to {turns}"):
                train(make)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Asking, r"step\(\) of a Asking needs epoch, metric, .*call its step\(epoch, metric\) in on_update"),
        (lambda optimizer: [schedulers.StepLR(optimizer, 1), Asking(optimizer)], "needs epoch, metric"),
        (transformers.optimization.GreedyLR, "needs metrics"),
        (schedulers.ReduceLROnPlateau, r"step\(metric\) in on_update"),
        (
            lambda optimizer: accelerate.scheduler.AcceleratedScheduler(
                schedulers.StepLR(optimizer, 1), optimizer
            ),
            r"pass its attribute \.scheduler",
        ),
        (
            transformers.optimization.AdafactorSchedule,
            "omit scheduler=: Adafactor finds its rates without it",
        ),
    ],
)
def test_a_schedule_that_cannot_be_turned_is_refused_with_what_to_do(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(make)


def test_a_schedule_that_hides_what_it_needs_is_told_at_its_first_turn() -> None:
    with pytest.raises(UsageError, match=r"scheduler\.step\(\) raised TypeError .*step it in on_update"):
        train(lambda optimizer: Wrapped(Asking(optimizer), 1))


def test_a_schedule_without_a_state_is_told_at_the_first_checkpoint(tmp_path: Path) -> None:
    class Stateless:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        def step(self) -> None:
            self.optimizer.param_groups[0]["lr"] *= 0.9

    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel = stretto.DataParallel(model, optimizer, scheduler=Stateless(optimizer))
    parallel.backward(model(torch.ones(1, 3)).sum())
    with pytest.raises(CheckpointError, match="a Stateless has no state_dict"):
        checkpoint.save(parallel, tmp_path)
