"""Where the time of an average update goes."""

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

STEADY_AFTER = 3
"""First updates that an average leaves out where there are others: memory is new, and overlapping only begins."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UpdateTime:
    """Seconds of an average update on rank 0; the three parts add up to the whole.

    Of methods that cannot tell their parts, which are others' than ours, compute, exposed and lane are NaN.
    """

    seconds: float
    compute: float
    """All that is not waiting: micro-batches, and whatever the loop does beside them."""
    exposed: float
    """Waiting for the communication lane."""
    data: float
    """Waiting for the loader."""
    lane: float
    """The communication lane was busy; beside the compute lane, where the strategy overlaps."""
    updates: int
    """How many are averaged over."""


def of_updates(columns: Mapping[str, NDArray[np.float64]]) -> UpdateTime | None:
    """Return the time of an average update, without evaluations and checkpoints; None for fewer than two updates."""
    training_seconds = columns["training_seconds"]
    first = STEADY_AFTER if len(training_seconds) > STEADY_AFTER + 1 else 1
    if len(training_seconds) < first + 1:
        return None
    seconds = (training_seconds[-1] - training_seconds[first - 1]) / (len(training_seconds) - first)
    exposed, data, lane = (
        float(np.nan_to_num(columns[name][first:]).mean())
        for name in ("exposed_seconds", "wait_seconds", "lane_seconds")
    )
    return _time(float(seconds), exposed, data, lane, len(training_seconds) - first)


def of_totals(totals: Mapping[str, float]) -> UpdateTime | None:
    """Return the time of an average update of a whole run, its first updates included; None where it is not known."""
    updates, seconds = totals.get("updates", np.nan), totals.get("seconds", np.nan)
    if not (updates > 0 and seconds > 0):
        return None
    exposed, lane = (totals.get(name, np.nan) / updates for name in ("exposed_seconds", "lane_seconds"))
    data = float(np.nan_to_num(totals.get("wait_seconds", 0.0))) / updates
    return _time(seconds / updates, exposed, data, lane, int(updates))


def _time(seconds: float, exposed: float, data: float, lane: float, updates: int) -> UpdateTime | None:
    if not np.isfinite(seconds):
        return None
    compute = float(np.maximum(0.0, seconds - exposed - data))
    return UpdateTime(
        seconds=seconds, compute=compute, exposed=exposed, data=data, lane=lane, updates=updates
    )
