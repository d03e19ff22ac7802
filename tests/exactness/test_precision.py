"""16-bit wires, models and accumulation: still the equations, with rounding where it is said to happen."""

import functools
import itertools

import pytest
import torch

from stretto import Options
from tests.exactness.checks import check, expected_counts
from tests.exactness.jobs import STRATEGIES, Case, Observed, describe, same, train_all
from tests.exactness.reference import trace
from tests.processes import run_ranks

# Model, wire, accumulation.
PRECISIONS = (
    (torch.float32, "bf16", "fp32"),
    (torch.bfloat16, "fp32", "fp32"),
    (torch.bfloat16, "bf16", "fp32"),
    (torch.bfloat16, "bf16", "parameter"),
)
CASES = [
    Case(
        strategy=strategy,
        tokens=True,
        dtype=dtype,
        lengths=(11,),
        options=Options(bucket_bytes=4096, wire=wire, accumulate=accumulate, clip_norm=1.5),
    )
    for strategy, (dtype, wire, accumulate) in itertools.product(STRATEGIES, PRECISIONS)
]


@functools.cache
def observed(world_size: int) -> list[list[Observed]]:
    return [train_all(0, CASES)] if world_size == 1 else run_ranks(world_size, train_all, CASES)


@pytest.mark.long(keep=4)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("index", range(len(CASES)), ids=map(describe, CASES))
def test_rounded_training_equals_rounded_equations(index: int, world_size: int) -> None:
    counts = expected_counts(CASES[index], world_size)
    check([found[index] for found in observed(world_size)], trace(CASES[index], world_size, counts), counts)


@pytest.mark.parametrize("index", range(len(CASES)), ids=map(describe, CASES))
def test_owner_shows_what_it_sends(index: int) -> None:
    first, second = (found[index] for found in observed(2))
    assert [pair for pair in zip(first.shown, second.shown, strict=True) if not same(*pair)] == []
    assert same(first.final, second.final)


# A replicated optimizer sends gradients only: its parameters are rounded to the model's dtype, not to the wire.
SENDS_PARAMETERS = [i for i, case in enumerate(CASES) if case.strategy.name != "ddp"]


@pytest.mark.parametrize("index", SENDS_PARAMETERS, ids=lambda i: describe(CASES[i]))
def test_lone_rank_shows_what_it_would_send(index: int) -> None:
    for state in observed(1)[0][index].shown[1:]:
        assert same(state, [value.bfloat16().to(value.dtype) for value in state])
