"""The mean of a few values with its 95 % interval, by Student's t."""

import statistics
from collections.abc import Sequence

from scipy import stats

Interval = dict[str, float]
"""`mean`, `low` and `high`."""


def interval(values: Sequence[float]) -> Interval:
    """Return the mean and its 95 % interval; of a single value the mean alone."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return {"mean": mean}
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return {"mean": mean, "low": mean - half, "high": mean + half}


def difference(own: Sequence[float], other: Sequence[float]) -> Interval:
    """Return the interval of the paired differences `own - other`."""
    return interval([a - b for a, b in zip(own, other, strict=True)])
