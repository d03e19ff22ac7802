"""SlowMo and elastic averaging, in the words of their papers, are `diloco` with other options."""

import random

import pytest
import torch
from torch import Tensor

from stretto import DiLoCo
from tests.diloco.jobs import RANKS, RATE, UPDATES, Naive, on_cluster, weight


def mean(naive: Naive, since: list[float]) -> Tensor:
    """Of what all ranks hold, by what each has contributed; the papers have ranks that contribute alike."""
    shares = torch.tensor(since) / sum(since)
    return sum(share * value for share, value in zip(shares, naive.values(), strict=True))


def close(found: DiLoCo, expected: list[list[Tensor]]) -> None:
    for rank, course in enumerate(on_cluster(found)):
        for step, (one, of_ranks) in enumerate(zip(course.shown, expected, strict=False)):
            # A dozen steps of float32, rounded in another order.
            torch.testing.assert_close(
                one, of_ranks[rank], rtol=1e-5, atol=1e-6, msg=f"rank {rank}, update {step + 1}"
            )


@pytest.mark.parametrize("seed", range(5))
def test_slowmo_is_an_outer_step_with_a_heavy_ball(seed: int) -> None:
    """u ← β u + (x_0 - x̄) / γ and x_0 ← x_0 - α γ u, with γ the inner rate and buffers that ranks keep."""
    draws = random.Random(seed)
    interval, alpha, beta = draws.choice([1, 2, 3, 5]), draws.uniform(0.3, 1.2), draws.uniform(0.0, 0.9)
    naive = Naive(DiLoCo(interval=interval))
    start, slow = naive.values()[0].clone(), torch.zeros_like(naive.values()[0])
    expected, since = [], [0.0] * RANKS
    for step in range(UPDATES):
        naive.step_alone(step)
        since = [one + weight(rank, step) for rank, one in enumerate(since)]
        if (step + 1) % interval == 0:
            slow = beta * slow + (start - mean(naive, since)) / RATE
            start = start - alpha * RATE * slow
            for value in naive.values():
                value.copy_(start)
            since = [0.0] * RANKS
        expected.append([value.clone() for value in naive.values()])
    close(DiLoCo(interval=interval, outer_lr=alpha, outer_momentum=beta, nesterov=False), expected)


@pytest.mark.parametrize("seed", range(5))
def test_elastic_averaging_is_a_mix_with_a_centre_that_moves_towards_the_mean(seed: int) -> None:
    """x̃ ← x̃ + β (x̄ - x̃), and x ← x - α (x - x̃) at the centre that has moved."""
    draws = random.Random(seed)
    interval, alpha, beta = draws.choice([1, 2, 3, 5]), draws.uniform(0.1, 0.9), draws.uniform(0.1, 1.0)
    naive = Naive(DiLoCo(interval=interval))
    centre = naive.values()[0].clone()
    expected, since = [], [0.0] * RANKS
    for step in range(UPDATES):
        naive.step_alone(step)
        since = [one + weight(rank, step) for rank, one in enumerate(since)]
        if (step + 1) % interval == 0:
            centre = centre + beta * (mean(naive, since) - centre)
            for value in naive.values():
                value.sub_(alpha * (value - centre))
            since = [0.0] * RANKS
        expected.append([value.clone() for value in naive.values()])
    close(DiLoCo(interval=interval, outer_lr=beta, outer_momentum=0.0, mix=1 - alpha), expected)
    assert not torch.equal(expected[-1][0], expected[-1][1])
