"""Jobs that several test modules look at, run once: starting ranks costs more than training in them."""

import functools
import itertools

from stretto import Options
from tests.exactness.jobs import STRATEGIES, Case, Observed, describe, train_all
from tests.processes import run_ranks

CLIP_NORM = 1.25  # on two ranks the mean gradients' norms lie on both sides of it

EVERY_CASE = [
    Case(
        strategy=strategy,
        optimizer=optimizer,
        tokens=tokens,
        options=Options(bucket_bytes=4096, clip_norm=clip_norm),
    )
    for strategy, optimizer, clip_norm, tokens in itertools.product(
        STRATEGIES, ("sgd", "adamw"), (None, CLIP_NORM), (False, True)
    )
]
"""Every strategy with every combination of optimizer, clipping and weights."""


def is_odd(case: Case) -> bool:
    """Halve the combinations of a strategy, so that each half has every pair of settings."""
    return (case.optimizer == "adamw") ^ (case.options.clip_norm is not None) ^ case.tokens


CASES = [case for case in EVERY_CASE if is_odd(case)]
CASES_BY_WORLD_SIZE = {
    1: [case for case in EVERY_CASE if not is_odd(case)],
    2: CASES,
    # Four add more terms in an order that matters; the optimizer and the rest see the sum alone.
    4: [
        case
        for case in EVERY_CASE
        if case.tokens is (case.options.clip_norm is not None) is (case.optimizer == "adamw")
    ],
}
RUNS = [
    (world_size, index) for world_size, cases in CASES_BY_WORLD_SIZE.items() for index in range(len(cases))
]


@functools.cache
def observed(world_size: int) -> list[list[Observed]]:
    """Return what every rank saw of every case."""
    cases = CASES_BY_WORLD_SIZE[world_size]
    return [train_all(0, cases)] if world_size == 1 else run_ranks(world_size, train_all, cases)


def describe_run(run: tuple[int, int]) -> str:
    """Return a name for a world size and the index of a case."""
    world_size, index = run
    return f"{world_size}-{describe(CASES_BY_WORLD_SIZE[world_size][index])}"


WATCHED = [Case(strategy=strategy, batch_norm=True, tokens=True) for strategy in STRATEGIES]


@functools.cache
def watched() -> list[list[Observed]]:
    """Return what both ranks saw of the watched cases."""
    return run_ranks(2, train_all, WATCHED)
