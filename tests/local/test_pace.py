"""Coins are functions of seed and index alone, and their rates are what was asked for."""

import itertools
import math
import statistics

import pytest

from stretto.strategies.local import Pace

EVEN = [0.0, 0.1, 0.25, 1 / 3, 0.7, 0.9, 1.0]


@pytest.mark.parametrize("rate", EVEN)
def test_even_coin_is_heads_as_often_as_its_rate_and_leaves_even_gaps(rate: float) -> None:
    """At every length; gaps differ by one at most."""
    pace = Pace(rate, "even", 0)
    heads: list[int] = []
    for index in range(1000):
        heads += [index] if pace.is_due(index) else []
        assert len(heads) in (math.floor(rate * (index + 1)), round(rate * (index + 1)))
    if rate:
        gaps = {after - before for before, after in itertools.pairwise([-1, *heads])}
        assert gaps <= {math.floor(1 / rate), math.ceil(1 / rate)}


def test_even_coin_follows_a_schedule() -> None:
    pace = Pace(lambda index: 1.0 if index < 10 else 0.1, "even", 0)
    heads = [index for index in range(110) if pace.is_due(index)]
    assert heads == [*range(10), *range(19, 110, 10)]


@pytest.mark.parametrize("plan", ["even", "bernoulli"])
def test_asking_out_of_turn_changes_nothing(plan: str) -> None:
    def falling(index: int) -> float:
        return 1 / (1 + index / 10)

    forward = [Pace(falling, plan, 5).is_due(index) for index in range(200)]
    pace = Pace(falling, plan, 5)
    assert [pace.is_due(index) for index in reversed(range(200))][::-1] == forward
    assert [pace.is_due(index) for index in range(200)] == forward


def test_bernoulli_coin_has_its_rate_and_a_geometric_tail() -> None:
    pace = Pace(0.2, "bernoulli", 1)
    heads = [index for index in range(20_000) if pace.is_due(index)]
    # Binomial: the standard deviation of the rate is sqrt(0.2 * 0.8 / 20000) = 0.0028; five of them.
    assert len(heads) / 20_000 == pytest.approx(0.2, abs=0.015)
    gaps = [after - before for before, after in itertools.pairwise(heads)]
    # Geometric with mean 5: standard deviation sqrt(0.8) / 0.2 = 4.47, its estimate within 6 % for 4000 gaps.
    assert statistics.stdev(gaps) == pytest.approx(4.47, rel=0.1)
