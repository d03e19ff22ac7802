"""A loss or gradient that is not finite: named everywhere, or left out everywhere."""

import functools
from typing import Any

import pytest
import torch

from stretto import DataParallel, DiLoCo, LocalSGD, Options, ZeRO1, errors
from stretto.strategies import Strategy
from stretto_lab.virtual import VirtualCluster
from tests.draws import part
from tests.exactness.checks import check
from tests.exactness.jobs import (
    STRATEGIES,
    Case,
    Observed,
    build_model,
    build_optimizer,
    describe,
    mean_loss,
    stream,
    train,
    train_all,
    wrap,
)
from tests.exactness.reference import fixed_counts, trace
from tests.processes import run_ranks

TRIED = part(STRATEGIES)
POISONED = 5
"""Lies in the second update: in its first half, where there are two of 2 or (1, 3)."""
SKIP = [
    Case(
        strategy=strategy,
        lengths=(15, 15),
        poisoned=(POISONED,),
        branch="first micro-batch",
        options=Options(bucket_bytes=4096, nonfinite="skip"),
    )
    for strategy in TRIED
]
RAISE = [Case(strategy=strategy, lengths=(15, 15), poisoned=(POISONED,)) for strategy in TRIED]


def scenarios(rank: int) -> tuple[list[Observed], list[str]]:
    skipped = train_all(rank, SKIP)
    return skipped, [message_of(rank, case) for case in RAISE]


def message_of(rank: int, case: Case) -> str:
    try:
        train(rank, case)
    except errors.NonFinite as error:
        return str(error)
    return "nothing was raised"


@functools.cache
def observed() -> list[tuple[list[Observed], list[str]]]:
    return run_ranks(2, scenarios)


every_strategy = pytest.mark.parametrize("index", range(len(TRIED)), ids=map(describe, RAISE))


@every_strategy
def test_every_rank_names_the_rank_and_the_step(index: int) -> None:
    for rank, (_, messages) in enumerate(observed()):
        assert messages[index].startswith(f"rank {rank}, step 2, round ")
        assert "the loss is not finite on ranks [1]" in messages[index]
        assert "nonfinite='skip'" in messages[index]


@every_strategy
def test_skipped_round_equals_the_equations_without_it(index: int) -> None:
    case = SKIP[index]
    ranks = [skipped[index] for skipped, _ in observed()]
    rounds = len(ranks[0].updates[0].rounds)
    counts = fixed_counts(
        15, case.strategy.quotas(4, rounds), 2
    )  # the reference leaves out what is not finite
    expected = trace(case, 2, counts)
    if rounds == 1:
        del expected.committed[1]  # nothing was committed for that update
    expected.shown = distinct(expected.shown)
    check(ranks, expected)


def distinct(states: list) -> list:
    """Drop states that equal the one before."""
    return [s for i, s in enumerate(states) if i == 0 or not all(map(torch.equal, s, states[i - 1]))]


@every_strategy
def test_skipped_rounds_are_counted(index: int) -> None:
    for skipped, _ in observed():
        updates = skipped[index].updates
        assert [update.skipped_rounds for update in updates] == [0, 1, *[0] * (len(updates) - 2)]
        assert [update for update in updates if not torch.isfinite(torch.tensor(update.loss))] == []


def test_a_finite_loss_with_an_infinite_gradient_is_skipped() -> None:
    case = Case(strategy=ZeRO1())
    model, parallel = wrap(case, micro_batches=1, options=Options(nonfinite="skip"))
    # The slope of a square root is infinite at zero.
    loss = mean_loss(model, stream(case, 0)[0]) + (model.leave.bias - model.leave.bias.detach()).sqrt().sum()
    assert torch.isfinite(loss)
    assert parallel.backward(loss) is None
    assert parallel.backward(mean_loss(model, stream(case, 0)[0])).skipped_rounds == 1


def test_sum_that_overflows_is_noticed() -> None:
    case = Case(strategy=ZeRO1())

    def train(rank: int, group: Any) -> None:
        model, parallel = wrap(case, group, micro_batches=1)
        # Each rank's gradient is finite, and so is its norm; the sum of both is not.
        parallel.backward(sum((parameter * 3e38).sum() for parameter in model.parameters()))

    with pytest.raises(errors.NonFinite, match="overflows"):
        VirtualCluster(2).run(train)


@pytest.mark.parametrize("strategy", [*STRATEGIES, LocalSGD(rate=0.5), DiLoCo(interval=2)], ids=str)
def test_running_statistics_that_a_batch_of_no_weight_damages_are_noticed(strategy: Strategy) -> None:
    """Its loss and its gradient count nothing, so only the model's buffers tell of it."""

    def train(rank: int, group: Any, options: Options) -> tuple[int, list[torch.Tensor]]:
        case = Case(strategy=strategy, batch_norm=True)
        model = build_model(case)
        model.register_buffer("lowest", torch.tensor(float("inf")))  # not finite from the beginning
        parallel = DataParallel(
            model, build_optimizer(case, model.parameters()), strategy,
            micro_batches=2, group=group, options=options,
        )  # fmt: skip
        skipped = 0
        for step, (x, y, _, uses_branch) in enumerate(parallel.feed(stream(case, rank))):
            is_padding = rank == 1 and step == POISONED
            output = model(torch.full_like(x, torch.nan) if is_padding else x, uses_branch)
            update = parallel.backward((output - y).square().mean(), weight=0.0 if is_padding else 1.0)
            skipped += update.skipped_rounds if update else 0
        updates = parallel.finish()
        return skipped + sum(update.skipped_rounds for update in updates), list(model.normalise.buffers())

    ranks = VirtualCluster(2).run(lambda *a: train(*a, Options(nonfinite="skip"))).values
    assert [
        (statistics, buffer)
        for _, statistics in ranks
        for buffer in statistics
        if not buffer.isfinite().all()
    ] == []
    assert ranks[1][0] == 1  # where replicas step alone, rank 0 leaves nothing out
    with pytest.raises(errors.NonFinite, match=r"buffers of the model are not finite on ranks \[1\]"):
        VirtualCluster(2).run(lambda *a: train(*a, Options()))
