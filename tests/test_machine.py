"""What a process may use of its machine."""

import os
import random

import pytest

from stretto.machine import share_of_cores, usable_cores
from tests.draws import seeds
from tests.processes import run_ranks


def bound_to_one(rank: int) -> tuple[int, set[int]]:
    one = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {one})
    return one, usable_cores()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no process to cores")
def test_a_process_that_is_bound_to_a_core_counts_no_other() -> None:
    ((one, found),) = run_ranks(1, bound_to_one, backend=None)
    assert found == {one}


@pytest.mark.parametrize(
    ("cores_of_rank", "expected"),
    [
        ([range(8), range(8)], [4, 4]),
        ([range(4), range(4, 8)], [4, 4]),
        ([range(8), range(2)], [7, 1]),
        ([range(1), range(1), range(1), range(1)], [0.25] * 4),
    ],
)
def test_ranks_that_are_bound_to_cores_have_these_and_share_the_rest(
    cores_of_rank: list[range], expected: list[float]
) -> None:
    assert [share_of_cores(own, cores_of_rank) for own in cores_of_rank] == expected


@pytest.mark.parametrize("seed", seeds(8))
def test_the_ranks_of_a_machine_have_together_every_core_that_one_of_them_may_use(seed: int) -> None:
    drawn = random.Random(seed)
    cores_of_rank = [drawn.sample(range(64), drawn.randrange(64)) for _ in range(seed + 1)]
    together = sum(share_of_cores(own, cores_of_rank) for own in cores_of_rank)
    assert together == pytest.approx(len(set().union(*cores_of_rank)), rel=1e-12)  # a few roundings of 1e-16
