"""How a job ends: together on all ranks, with nothing lost."""

import dataclasses
import functools

import pytest

from stretto import ACCO, DataParallel, WeightPrediction
from stretto.strategies import Strategy
from tests.exactness.checks import check, recorded_counts
from tests.exactness.jobs import (
    STRATEGIES,
    Case,
    Observed,
    build_model,
    build_optimizer,
    describe,
    mean_loss,
    parameters_of,
    same,
    stream,
    train_all,
)
from tests.exactness.reference import trace
from tests.processes import run_ranks

LENGTHS = (5, 11)
ANY = [Case(strategy=strategy, lengths=LENGTHS, until="any") for strategy in STRATEGIES]
ALL = [Case(strategy=strategy, lengths=LENGTHS, until="all") for strategy in STRATEGIES]
LEAVING = (6, 1)
"""Micro-batches after which each rank leaves its loop."""
# A rank that drains early cannot turn its schedule as the others do, so there is none.
LEFT = [Case(strategy=strategy, scheduled=False) for strategy in STRATEGIES]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Endings:
    """What one rank saw of all scenarios, in the order of `STRATEGIES` each."""

    any: list[Observed]
    all: list[Observed]
    stopped: list[tuple[int, int]]
    left: list[Observed]


def scenarios(rank: int) -> Endings:
    return Endings(
        any=train_all(rank, ANY),
        all=train_all(rank, ALL),
        stopped=[stop_at_rank_one(rank, strategy) for strategy in STRATEGIES],
        left=[leave_loop(rank, case, LEAVING[rank]) for case in LEFT],
    )


def stop_at_rank_one(rank: int, strategy: Strategy) -> tuple[int, int]:
    """Return the micro-batches fed until a stop that rank 1 asked for at its sixth, and the updates."""
    case = Case(strategy=strategy, lengths=(1000,))
    model = build_model(case)
    parallel = DataParallel(model, build_optimizer(case, model.parameters()), strategy, micro_batches=4)
    for count, batch in enumerate(parallel.feed(stream(case, rank)), start=1):
        parallel.backward(mean_loss(model, batch))
        if rank == 1 and count == 6:
            parallel.stop()
    parallel.finish()
    return count, parallel.steps


def leave_loop(rank: int, case: Case, length: int) -> Observed:
    """Train without `feed`, on `length` micro-batches, and finish."""
    model = build_model(case)
    optimizer = build_optimizer(case, model.parameters())
    parallel = DataParallel(
        model, optimizer, case.strategy, micro_batches=case.micro_batches, options=case.options
    )
    shown, updates = [parameters_of(model)], []
    for batch in stream(dataclasses.replace(case, lengths=(length,)), rank):
        update = parallel.backward(mean_loss(model, batch))
        if not same(parameters_of(model), shown[-1]):
            shown.append(parameters_of(model))
        if update:
            updates.append(update)
    drained = parallel.finish()
    return Observed(
        shown=shown,
        committed=[],
        statistics=[],
        live_statistics=[],
        final=parameters_of(model),
        final_statistics=[],
        updates=updates + drained,
        drained=len(drained),
        behind=len(drained),
    )


@functools.cache
def endings() -> list[Endings]:
    return run_ranks(2, scenarios)


every_strategy = pytest.mark.parametrize("index", range(len(STRATEGIES)), ids=map(describe, ANY))


@every_strategy
def test_feed_until_any_ends_together_soon_after_the_first_end_of_data(index: int) -> None:
    ranks = [found.any[index] for found in endings()]
    counts = recorded_counts(ranks[0])
    check(ranks, trace(ANY[index], 2, counts), counts)
    totals = [sum(by_rank[rank] for update in counts for by_rank in update) for rank in range(2)]
    assert totals[0] == LENGTHS[0]
    # The rank with more goes on to the end of the round in which the other's end was told: two updates' worth.
    assert totals[0] < totals[1] <= 8 + (4 if ANY[index].strategy.overlaps else 0)


@every_strategy
def test_feed_until_all_uses_every_batch_of_every_rank(index: int) -> None:
    ranks = [found.all[index] for found in endings()]
    counts = recorded_counts(ranks[0])
    check(ranks, trace(ALL[index], 2, counts), counts)
    assert [sum(by_rank[rank] for update in counts for by_rank in update) for rank in range(2)] == list(
        LENGTHS
    )


@every_strategy
def test_rank_without_data_contributes_weight_zero(index: int) -> None:
    updates = endings()[0].all[index].updates
    assert [update.weight for update in updates] == [sum(update.micro_batches) for update in updates]
    assert updates[-1].micro_batches[0] == 0


@every_strategy
def test_stop_of_one_rank_ends_all_at_the_same_round(index: int) -> None:
    first, second = (found.stopped[index] for found in endings())
    assert first == second
    assert 8 <= first[0] <= 16


@every_strategy
def test_finish_drains_what_every_rank_had_left(index: int) -> None:
    # One rank leaves in its first window, the other in its second: not one gradient may be lost.
    ranks = [found.left[index] for found in endings()]
    counts = recorded_counts(ranks[0])
    totals = [sum(by_rank[rank] for update in counts for by_rank in update) for rank in range(2)]
    assert totals == list(LEAVING)
    for rank, found in enumerate(ranks):
        assert same(found.final, trace(LEFT[index], 2, counts).committed[-1]), f"rank {rank}"


@every_strategy
def test_finish_before_the_first_landing_commits_what_there_is(index: int) -> None:
    case = LEFT[index]
    found = leave_loop(0, case, 2)
    counts = recorded_counts(found)
    assert sum(by_rank[0] for update in counts for by_rank in update) == 2
    assert same(found.final, trace(case, 1, counts).committed[-1])


@every_strategy
def test_finish_without_a_micro_batch_changes_nothing(index: int) -> None:
    found = leave_loop(0, LEFT[index], 0)
    assert found.updates == []
    assert same(found.final, found.shown[0])


@every_strategy
def test_zero_total_weight_steps_nothing(index: int) -> None:
    case = ANY[index]
    model = build_model(case)
    parallel = DataParallel(model, build_optimizer(case, model.parameters()), case.strategy, micro_batches=2)
    batches = stream(case, 0)
    start = parameters_of(model)
    for batch in batches[:4]:
        assert parallel.backward(mean_loss(model, batch), weight=0.0) is None
    assert same(parameters_of(model), start)
    updates = [parallel.backward(mean_loss(model, batch)) for batch in batches[:2]]
    updates += [parallel.backward(mean_loss(model, batches[0]), weight=0.0) for _ in range(4)]
    updates += parallel.finish()
    assert [update.step for update in updates if update] == [1]
    # AdamW would move on a zero gradient, by weight decay and momentum.
    assert same(parameters_of(model), trace(case, 1, one_update(case.strategy)).committed[-1])


def one_update(strategy: Strategy) -> list:
    return [[[1], [1]]] if isinstance(strategy, ACCO) else [[[2]]]


def test_model_is_an_ordinary_one_after_finish() -> None:
    case = Case(strategy=WeightPrediction())
    model = build_model(case)
    optimizer = build_optimizer(case, model.parameters())
    parallel = DataParallel(model, optimizer, case.strategy, micro_batches=1)
    for batch in stream(case, 0)[:3]:
        parallel.backward(mean_loss(model, batch))
    parallel.finish()
    assert [parameter for parameter in model.parameters() if parameter.grad is not None] == []
    model.state_dict()
    mean_loss(model, stream(case, 0)[0]).backward()
    optimizer.step()
