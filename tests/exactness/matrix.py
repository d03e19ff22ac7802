"""Jobs that several test modules look at, run once: starting ranks costs more than training in them."""

import functools
import itertools

import torch

from stretto import Options
from tests.draws import part
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


CASES = part(case for case in EVERY_CASE if is_odd(case))
# Model, wire, accumulation.
PRECISIONS = (
    (torch.float32, "bf16", "fp32"),
    (torch.bfloat16, "fp32", "fp32"),
    (torch.bfloat16, "bf16", "fp32"),
    (torch.bfloat16, "bf16", "parameter"),
)
ROUNDED = part(
    Case(
        strategy=strategy,
        tokens=True,
        dtype=dtype,
        lengths=(11,),
        options=Options(bucket_bytes=4096, wire=wire, accumulate=accumulate, clip_norm=1.5),
    )
    for strategy, (dtype, wire, accumulate) in itertools.product(STRATEGIES, PRECISIONS)
)
"""16-bit wires, models and accumulation: the equations with rounding where it is said to happen."""
UNUSED_OPTIONS = Options(bucket_bytes=4096, allow_unused=True)
UNUSED = part(
    [
        *(
            Case(strategy=strategy, branch=branch, lengths=(19,), options=UNUSED_OPTIONS)
            for strategy, branch in itertools.product(
                STRATEGIES, ("some", "one rank", "never", "first micro-batch")
            )
        ),
        *(
            Case(strategy=strategy, tied=True, frozen=True, branch="some", options=UNUSED_OPTIONS)
            for strategy in STRATEGIES
        ),
        *(Case(strategy=strategy, batch_norm=True, branch="some") for strategy in STRATEGIES),
    ]
)
"""Parameters without gradient, frozen and tied ones: the reference steps a stock optimizer with `.grad = None`, which
has no decay, no momentum and no count of steps for them."""
WATCHED = [Case(strategy=strategy, batch_norm=True, tokens=True) for strategy in STRATEGIES]
"""Statistics of a BatchNorm."""

GROUPS: dict[str, tuple[int, list[Case]]] = {
    "alone": (1, part(case for case in EVERY_CASE if not is_odd(case))),
    "two": (2, CASES),
    # Four add more terms in an order that matters; the optimizer and the rest see the sum alone.
    "four": (
        4,
        part(
            case
            for case in EVERY_CASE
            if case.tokens is (case.options.clip_norm is not None) is (case.optimizer == "adamw")
        ),
    ),
    "rounded alone": (1, ROUNDED),
    "rounded": (2, ROUNDED),
    "unused": (2, UNUSED),
    "watched": (2, WATCHED),
}
"""Ranks and jobs by the name of their group."""
RUNS = [(name, index) for name, (_, cases) in GROUPS.items() for index in range(len(cases))]


@functools.cache
def observed(name: str) -> list[list[Observed]]:
    """Return what every rank saw of every case of a group."""
    world_size, cases = GROUPS[name]
    return [train_all(0, cases)] if world_size == 1 else run_ranks(world_size, train_all, cases)


def describe_run(run: tuple[str, int]) -> str:
    """Return a name for a case of a group."""
    name, index = run
    return f"{name}-{describe(GROUPS[name][1][index])}"
