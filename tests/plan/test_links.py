"""What is said of a link whose transfers take known times, measured by a clock that is not exact."""

import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from stretto_lab.plan.measure import Ranks, measure_link

CLOCK_ERROR = 5e-5
"""Seconds by which a measured time may be too long."""
LARGEST = 2**28
"""Bytes of memory that may be asked for."""


class OnLink(Ranks):
    """Ranks behind a link whose transfers take their bytes over the rate, after one latency or one each."""

    def __init__(
        self, bits_per_second: float, latency: float, draws: random.Random, in_turn: bool = False
    ) -> None:
        self.device = torch.device("meta")
        self.passed = 0.0
        self._rate, self._latency, self._draws, self._in_turn = bits_per_second, latency, draws, in_turn

    def gather(self, values: Sequence[float]) -> Tensor:
        return torch.tensor([values], dtype=torch.float64)

    def send(self, outgoing: Sequence[Tensor], to: Sequence[int], times: int = 1) -> None:
        there = sum(one.nbytes for one in outgoing)
        assert there <= LARGEST
        bits = 8 * there * (len(to) - 1) / len(to)
        self.passed += self._latency * (times if self._in_turn else 1) + times * bits / self._rate

    def seconds(self, work: Callable[[], object]) -> float:
        before = self.passed
        work()
        return self.passed - before + self._draws.uniform(0, CLOCK_ERROR)


@pytest.mark.parametrize("ranks", [2, 4])
def test_rates_of_links_from_slow_sockets_to_the_fastest_between_devices_are_found(ranks: int) -> None:
    for seed in range(200):
        draws = random.Random(seed)
        rate, latency = 10 ** draws.uniform(5, 13), 10 ** draws.uniform(-6, -1)
        in_turn = draws.random() < 0.5
        link = measure_link(OnLink(rate, latency, draws, in_turn), range(ranks))
        assert link.bits_per_second is not None
        assert latency <= link.latency_seconds <= latency + CLOCK_ERROR + 8 * ranks / rate, seed
        assert link.bits_per_second <= 1.01 * rate, seed
        if not in_turn or 8 * 2**25 / rate > 20 * latency:
            assert link.bits_per_second >= 0.9 * rate, (seed, rate, latency)


def test_a_link_that_takes_no_time_has_a_rate_that_is_a_number() -> None:
    link = measure_link(OnLink(math.inf, 0.0, random.Random(0)), range(2))
    assert link.bits_per_second is not None
    assert math.isfinite(link.bits_per_second)
