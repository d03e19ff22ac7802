"""Parameters without gradient, frozen and tied ones, and buffers, as stock PyTorch treats them."""

import functools
import itertools

import pytest

from stretto import Options
from tests.exactness.checks import check, expected_counts
from tests.exactness.jobs import STRATEGIES, Case, Observed, describe, same, train_all
from tests.exactness.reference import trace
from tests.processes import run_ranks

OPTIONS = Options(bucket_bytes=4096, allow_unused=True)
CASES = [
    *(
        Case(strategy=strategy, branch=branch, lengths=(19,), options=OPTIONS)
        for strategy, branch in itertools.product(
            STRATEGIES, ("some", "one rank", "never", "first micro-batch")
        )
    ),
    *(
        Case(strategy=strategy, tied=True, frozen=True, branch="some", options=OPTIONS)
        for strategy in STRATEGIES
    ),
    *(Case(strategy=strategy, batch_norm=True, branch="some") for strategy in STRATEGIES),
]


@functools.cache
def observed() -> list[list[Observed]]:
    return run_ranks(2, train_all, CASES)


@pytest.mark.long(keep=3)
@pytest.mark.parametrize("index", range(len(CASES)), ids=map(describe, CASES))
def test_parameter_without_gradient_is_skipped_as_stock_skips_it(index: int) -> None:
    # The reference steps a stock optimizer with `.grad = None`: no decay, no momentum, no count of steps.
    counts = expected_counts(CASES[index], 2)
    check([found[index] for found in observed()], trace(CASES[index], 2, counts), counts)


def test_zero_gradient_would_not_be_the_same() -> None:
    never = next(i for i, case in enumerate(CASES) if case.branch == "never")
    always_used = trace(
        Case(strategy=CASES[never].strategy, lengths=(19,)), 2, expected_counts(CASES[never], 2)
    )
    found = observed()[0][never]
    assert not same(found.final, always_used.committed[-1])
    names = ["branch.weight", "branch.bias"]
    unmoved = [i for i, (a, b) in enumerate(zip(found.final, found.shown[0], strict=True)) if a.equal(b)]
    assert len(unmoved) == len(names)
