"""How a job ends: together on all ranks, with nothing lost."""

import dataclasses
import functools
from typing import Any

import pytest

from stretto import ACCO, Update
from stretto.strategies import Strategy
from tests.draws import part
from tests.exactness.checks import check, recorded_counts
from tests.exactness.jobs import (
    STRATEGIES,
    Case,
    State,
    build_model,
    describe,
    mean_loss,
    parameters_of,
    same,
    stream,
    train_all,
    wrap,
)
from tests.exactness.reference import Counts, trace
from tests.processes import run_ranks

TRIED = part(STRATEGIES)
LENGTHS = (5, 11)
ANY = [Case(strategy=strategy, lengths=LENGTHS, until="any") for strategy in TRIED]
ALL = [Case(strategy=strategy, lengths=LENGTHS, until="all") for strategy in TRIED]
LEAVING = (6, 1)
"""Micro-batches after which each rank leaves its loop."""
# A rank that drains early cannot turn its schedule as the others do, so there is none.
LEFT = [Case(strategy=strategy, scheduled=False) for strategy in TRIED]


def scenarios(rank: int) -> dict[str, list[Any]]:
    """Return what one rank sees of all scenarios, in the order of `TRIED` each."""
    return {
        "any": train_all(rank, ANY),
        "all": train_all(rank, ALL),
        "stopped": [stop_at_rank_one(rank, strategy) for strategy in TRIED],
        "left": [leave_loop(rank, case, LEAVING[rank]) for case in LEFT],
    }


def stop_at_rank_one(rank: int, strategy: Strategy) -> tuple[int, int]:
    """Return the micro-batches fed until a stop that rank 1 asked for at its sixth, and the updates."""
    case = Case(strategy=strategy, lengths=(1000,))
    model, parallel = wrap(case)
    for count, batch in enumerate(parallel.feed(stream(case, rank)), start=1):
        parallel.backward(mean_loss(model, batch))
        if rank == 1 and count == 6:
            parallel.stop()
    assert list(parallel.feed(stream(case, rank))) == []  # a stop lasts over passes
    parallel.finish()
    return count, parallel.steps


def leave_loop(rank: int, case: Case, length: int) -> tuple[list[Update], State]:
    """Train without `feed`, on `length` micro-batches, and finish; return the updates and what is shown then."""
    model, parallel = wrap(case)
    batches = stream(dataclasses.replace(case, lengths=(length,)), rank)
    updates = [parallel.backward(mean_loss(model, batch)) for batch in batches]
    return [*filter(None, updates), *parallel.finish()], parameters_of(model)


@functools.cache
def endings() -> list[dict[str, list[Any]]]:
    return run_ranks(2, scenarios)


def totals(counts: list[Counts], world_size: int) -> list[int]:
    """Return how many micro-batches of each rank are in updates."""
    return [sum(by_rank[rank] for update in counts for by_rank in update) for rank in range(world_size)]


every_strategy = pytest.mark.parametrize("index", range(len(TRIED)), ids=map(describe, ANY))


@every_strategy
def test_feed_until_any_ends_together_soon_after_the_first_end_of_data(index: int) -> None:
    ranks = [found["any"][index] for found in endings()]
    counts = recorded_counts(ranks[0])
    check(ranks, trace(ANY[index], 2, counts), counts)
    first, second = totals(counts, 2)
    assert first == LENGTHS[0]
    # The rank with more goes on to the end of the round in which the other's end was told: two updates' worth.
    assert first < second <= 8 + (4 if ANY[index].strategy.overlaps else 0)


@every_strategy
def test_feed_until_all_uses_every_batch_of_every_rank(index: int) -> None:
    ranks = [found["all"][index] for found in endings()]
    counts = recorded_counts(ranks[0])
    check(ranks, trace(ALL[index], 2, counts), counts)
    assert totals(counts, 2) == list(LENGTHS)
    updates = ranks[0].updates
    assert [update.weight for update in updates] == [sum(update.micro_batches) for update in updates]
    assert updates[-1].micro_batches[0] == 0  # a rank without data contributes weight 0


@every_strategy
def test_stop_of_one_rank_ends_all_at_the_same_round(index: int) -> None:
    first, second = (found["stopped"][index] for found in endings())
    assert first == second
    assert 8 <= first[0] <= 16


@every_strategy
def test_finish_drains_what_every_rank_had_left(index: int) -> None:
    # One rank leaves in its first window, the other in its second: not one gradient may be lost.
    # A lone one leaves without a micro-batch, or before the first landing.
    case = LEFT[index]
    for ranks, lengths in (
        ([found["left"][index] for found in endings()], LEAVING),
        *(([leave_loop(0, case, length)], (length,)) for length in (0, 2)),
    ):
        counts = [[list(by_rank) for by_rank in update.rounds] for update in ranks[0][0]]
        assert totals(counts, len(lengths)) == list(lengths)
        expected = [parameters_of(build_model(case)), *trace(case, len(lengths), counts).committed][-1]
        for rank, (_, final) in enumerate(ranks):
            assert same(final, expected), f"rank {rank} of {lengths}"


@every_strategy
def test_zero_total_weight_steps_nothing(index: int) -> None:
    case = ANY[index]
    model, parallel = wrap(case, micro_batches=2)
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
