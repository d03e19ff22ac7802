"""A user's own collectives on the default group, beside the library's."""

import functools

import pytest
import torch
from torch import distributed as dist

from tests.draws import part
from tests.exactness.jobs import STRATEGIES, Case, describe, mean_loss, stream, wrap
from tests.processes import run_ranks

CASES = [Case(strategy=strategy, lengths=(40,)) for strategy in part(STRATEGIES)]


def count_wrong(rank: int, case: Case) -> tuple[int, int, int]:
    """Return how many of the user's sums were wrong, how many there were, and the updates committed."""
    model, parallel = wrap(case)
    wrong = total = 0
    for index, batch in enumerate(parallel.feed(stream(case, rank))):
        # Different sizes, before and after each forward pass, so that a mixed-up message would be seen.
        values = [torch.full((1 + size,), float(index * 8 + size * (rank + 1))) for size in range(4)]
        for value in values[:2]:
            dist.all_reduce(value)
        loss = mean_loss(model, batch)
        for value in values[2:]:
            dist.all_reduce(value)
        parallel.backward(loss)
        wrong += sum(not (value == index * 16 + size * 3).all() for size, value in enumerate(values))
        total += len(values)
    parallel.finish()
    return wrong, total, parallel.steps


def count_wrong_for_all(rank: int) -> list[tuple[int, int, int]]:
    return [count_wrong(rank, case) for case in CASES]


@functools.cache
def counted() -> list[list[tuple[int, int, int]]]:
    return run_ranks(2, count_wrong_for_all)


@pytest.mark.parametrize("index", range(len(CASES)), ids=map(describe, CASES))
def test_every_sum_of_the_user_is_right(index: int) -> None:
    for ranks in counted():
        wrong, total, steps = ranks[index]
        assert wrong == 0
        assert total == 160
        assert steps == 10
