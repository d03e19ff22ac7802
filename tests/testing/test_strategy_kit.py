"""The library's strategies keep the laws of strategies, and each broken one breaks the law that it should."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from stretto import ACCO, DDP, DPU, Options, PAFTDyn, PAFTSync, WeightPrediction, ZeRO1
from stretto.strategies import STRATEGIES, Strategy
from stretto.strategies.ledger import ledger_of
from stretto_lab.testing import Job, differing, on_virtual_ranks, plain, strategy_faults, train
from tests.processes import run_program
from tests.testing.broken_strategies import (
    ClaimsToBeFresh,
    ClaimsToBeStale,
    DropsAGradient,
    ForgetsToGather,
    LetsRanksDiverge,
    ReusesAStaleGradient,
    SplitsUnevenly,
    TossesACoin,
    UsesAPartAgain,
    VariesItsRounds,
    YieldsNoEffect,
)

SOUND: list[tuple[Callable[[], Strategy], Sequence[int], dict[str, Any]]] = [
    (DDP, (1, 3), {}),
    (ZeRO1, (1, 3), {}),
    (DPU, (1, 2), {}),
    (WeightPrediction, (1, 3), {}),
    (ACCO, (1, 3), {"micro_batches": 4}),  # two to each of its rounds
    (lambda: PAFTSync(interval=2), (1, 2), {}),
    (lambda: PAFTDyn(first=1, maximum=2), (1, 3), {}),
    (lambda: PAFTSync(interval=2, overlap=True), (2,), {"updates": 4}),  # an average comes an update later
    (ACCO, (2,), {"run": run_program}),
]


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(
    ("make", "ranks", "choices"), SOUND, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_strategy_of_ours_keeps_the_laws(make: Any, ranks: Sequence[int], choices: dict[str, Any]) -> None:
    assert strategy_faults(make, ranks=ranks, **{"micro_batches": 2, "updates": 3, **choices}) == []


def test_every_strategy_that_keeps_ranks_alike_is_checked() -> None:
    checked = {make().name for make, *_ in SOUND}
    assert checked == {name for name, kind in STRATEGIES.items() if not ledger_of(kind()).local}


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("strategy", [DDP(), ZeRO1()], ids=lambda strategy: strategy.name)
def test_a_lone_rank_trains_as_a_plain_loop_to_the_bit(strategy: Strategy, optimizer: Any) -> None:
    options = Options(bucket_bytes=4096, allow_unused=True)  # the norm's square is summed in another order
    job = Job(strategy=strategy, optimizer=optimizer, options=options)
    (course,) = on_virtual_ranks(1, lambda rank, group: train(job, rank, group))
    assert differing(plain(job), course.committed) == []


BROKEN = [
    (YieldsNoEffect, "update 0, effect 2: expected one of the effects, found 'step'"),
    (ForgetsToGather, "a Gather after Reduce"),
    (ReusesAStaleGradient, "update 1, effect 2: expected a gradient that this update has reduced"),
    (ReusesAStaleGradient, "expected to be applied 1 times, found"),
    (DropsAGradient, "the gradients of rounds [0] reached no Step"),
    (DropsAGradient, "micro-batch 0 of rank 0 of 1: expected to be applied 1 times, found 0 times"),
    (UsesAPartAgain, "expected the sum, not a gradient that is in it"),
    (VariesItsRounds, "found [1, 1, 1, 1, 2, 1, 1, 1]"),
    (TossesACoin, "expected the same effects of equal options"),
    (SplitsUnevenly, "none empty: found [2, 2, 2, 2, 2, 2, 2, 2], [(4, 0)"),
    (ClaimsToBeFresh, "largest staleness on 1 ranks: expected 0, found 1"),
    (ClaimsToBeStale, "largest staleness on 1 ranks: expected 1, found 0"),
    (LetsRanksDiverge, "rank 1 of 2, against rank 0, state committed"),
]


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(("kind", "words"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_a_broken_strategy_breaks_the_law_that_names_its_fault(kind: type[Strategy], words: str) -> None:
    faults = strategy_faults(kind, ranks=(1, 2), updates=3)
    assert any(words in text for text in faults), faults
