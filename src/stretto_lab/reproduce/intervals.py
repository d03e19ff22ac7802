"""The mean of a few values with its 95 % interval, by Student's t."""

import math
import statistics
from collections.abc import Sequence
from typing import NotRequired, TypedDict

CONFIDENCE = 0.95
_STEPS = 60
"""Of the bisection: enough for every bit of a double."""


class Interval(TypedDict):
    """A mean, and between what it lies; of a single value there is a mean alone."""

    mean: float
    low: NotRequired[float]
    high: NotRequired[float]


def interval(values: Sequence[float]) -> Interval:
    """Return the mean and its 95 % interval; of a single value the mean alone."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return {"mean": mean}
    half = student(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return {"mean": mean, "low": mean - half, "high": mean + half}


def difference(own: Sequence[float], other: Sequence[float]) -> Interval:
    """Return the interval of the paired differences `own - other`."""
    return interval([a - b for a, b in zip(own, other, strict=True)])


def student(freedom: int) -> float:
    """Return the t that |T| stays below with a probability of 95 %, for so many degrees of freedom."""
    low, high = 0.0, 100.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < CONFIDENCE else (low, middle)
    return low


def _within(t: float, freedom: int) -> float:
    """Return P(|T| <= t): Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    is_odd = freedom % 2 == 1
    term = math.cos(angle) if is_odd else 1.0
    total = 0.0 if freedom == 1 else term
    for power in range(3 if is_odd else 2, freedom - 1, 2):
        term *= square * (power - 1) / power
        total += term
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total
