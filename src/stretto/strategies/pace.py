"""When averages are due: a pure function of a seed and the round's index, so that no rank has to ask another.

even         Σ_{i<=k} rate(i) reaches the next whole number: gaps as equal as integers allow
bernoulli    coin(seed, "average", k, rate(k)): gaps are geometric
"""

import math
from collections.abc import Callable
from typing import Literal

from stretto.coin import coin

Rate = float | Callable[[int], float]
"""Averages per update, in [0, 1]; or a function of the round's index that gives it."""
Plan = Literal["even", "bernoulli"]

_WHOLE = 2**40
"""Rates are rounded up to this fraction: ten times a tenth is a whole, and the excess is one average in 10^12."""


class Pace:
    """Says in which rounds ranks average.

    Args:
        rate: See `Rate`; cut to [0, 1].
        plan: How averages are spread.
        seed: Of the Bernoulli plan.
    """

    def __init__(self, rate: Rate, plan: Plan, seed: int) -> None:
        self._rate = rate
        self._plan = plan
        self._seed = seed
        # Σ_{i<index} rate(i), remembered where the last question has left it: indices mostly grow by one.
        self._index = 0
        self._sum = 0

    def is_due(self, index: int) -> bool:
        """Return whether the round at `index`, from 0, ends with an average: the same whenever it is asked."""
        if self._plan == "bernoulli":
            return coin(self._seed, "average", index, self._rate_at(index))
        before = self._sum_below(index)
        return (before + self._units(index)) // _WHOLE > before // _WHOLE

    def _rate_at(self, index: int) -> float:
        rate = self._rate(index) if callable(self._rate) else self._rate
        return min(1.0, max(0.0, float(rate)))

    def _units(self, index: int) -> int:
        return math.ceil(self._rate_at(index) * _WHOLE)

    def _sum_below(self, index: int) -> int:
        if not callable(self._rate):
            return index * self._units(0)
        if index < self._index:
            self._index = self._sum = 0
        while self._index < index:
            self._sum += self._units(self._index)
            self._index += 1
        return self._sum
