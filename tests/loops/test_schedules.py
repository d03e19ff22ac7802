"""Schedulers of every kind turn as in a plain loop, and what cannot be is told."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

import stretto
from stretto.errors import ConfigError, UsageError
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
    with pytest.raises(
        UsageError, match=r"stands at 2, and the library has turned it to 1: .*scheduler\.step\(\)"
    ):
        train(KINDS["LambdaLR"], by_hand=True)


def test_a_loaded_schedule_goes_on_where_it_was_saved() -> None:
    model = network()
    optimizer = sgd(model)
    scheduler = schedulers.StepLR(optimizer, 1)
    parallel = stretto.DataParallel(model, optimizer, scheduler=scheduler)
    parallel.backward(mean_square(model, batches()[0]))
    stretto.checkpoint.save(parallel, "checkpoints")
    parallel.backward(mean_square(model, batches()[1]))
    stretto.checkpoint.load(parallel, "checkpoints")
    parallel.backward(mean_square(model, batches()[1]))
    parallel.finish()
    assert scheduler.last_epoch == parallel.steps == 2


def test_a_plateau_is_turned_in_on_update() -> None:
    model = network()
    optimizer = sgd(model)
    plateau = schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=1e9)
    with pytest.raises(ConfigError, match=r"step\(metric\) in on_update"):
        stretto.DataParallel(model, optimizer, scheduler=plateau)
    parallel = stretto.DataParallel(model, optimizer, micro_batches=MICRO_BATCHES)
    for batch in parallel.feed(batches(), on_update=lambda update: plateau.step(update.loss)):
        parallel.backward(mean_square(model, batch))
    parallel.finish()
    assert plateau.last_epoch == 4
    assert optimizer.param_groups[0]["lr"] == pytest.approx(
        0.1 * 0.1**4
    )  # by such a threshold, no loss is better
