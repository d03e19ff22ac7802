"""The backend's own reductions give the same bits where there is only one order: the sum of two terms."""

import functools

import pytest

from stretto import Options
from tests.exactness.checks import check, expected_counts
from tests.exactness.jobs import STRATEGIES, Case, Observed, describe, train_all
from tests.exactness.reference import trace
from tests.processes import run_ranks

OPTIONS = Options(bucket_bytes=4096, exchange="native", clip_norm=1.25)
CASES = [Case(strategy=strategy, tokens=True, options=OPTIONS) for strategy in STRATEGIES]


@functools.cache
def observed() -> list[list[Observed]]:
    return run_ranks(2, train_all, CASES)


@pytest.mark.parametrize("index", range(len(CASES)), ids=map(describe, CASES))
def test_native_exchange_of_two_ranks_equals_the_equations(index: int) -> None:
    counts = expected_counts(CASES[index], 2)
    check([found[index] for found in observed()], trace(CASES[index], 2, counts), counts)
