"""Where the time of an average update goes, measured, and what the time model says (docs/time-model.md)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto_lab.page.records import items, number

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
    model: float | None
    """What the time model says for this compute time and this lane; None where it has no row for the strategy."""
    updates: int
    """How many are averaged over."""


def of_updates(
    columns: Mapping[str, NDArray[np.float64]], strategy: str, rounds: Sequence[Sequence[Any]]
) -> UpdateTime | None:
    """Return the time of an average update, without evaluations and checkpoints; None for fewer than two updates.

    Args:
        columns: Of the updates' records.
        strategy: As the run names it.
        rounds: Micro-batches of every update by round and rank.
    """
    training_seconds = columns["training_seconds"]
    first = STEADY_AFTER if len(training_seconds) > STEADY_AFTER + 1 else 1
    if len(training_seconds) < first + 1:
        return None
    seconds = (training_seconds[-1] - training_seconds[first - 1]) / (len(training_seconds) - first)
    exposed, data, lane = (
        float(np.nan_to_num(columns[name][first:]).mean())
        for name in ("exposed_seconds", "wait_seconds", "lane_seconds")
    )
    return _time(
        float(seconds), exposed, data, lane, strategy, _shares(rounds), len(training_seconds) - first
    )


def _shares(rounds: Sequence[Sequence[Any]]) -> list[float]:
    """Return the mean micro-batches of rank 0 in each round, over the updates with as many rounds as the first."""
    alike = [
        [number((*items(ranks), 0)[0]) for ranks in update]
        for update in rounds
        if len(update) == len(rounds[0])
    ]
    return [float(np.nan_to_num(counts).mean()) for counts in zip(*alike, strict=True)]


def of_totals(totals: Mapping[str, float], strategy: str) -> UpdateTime | None:
    """Return the time of an average update of a whole run, its first updates included; None where it is not known."""
    updates, seconds = totals.get("updates", np.nan), totals.get("seconds", np.nan)
    if not (updates > 0 and seconds > 0):
        return None
    exposed, lane = (totals.get(name, np.nan) / updates for name in ("exposed_seconds", "lane_seconds"))
    data = float(np.nan_to_num(totals.get("wait_seconds", 0.0))) / updates
    return _time(seconds / updates, exposed, data, lane, strategy, (1.0, 1.0), int(updates))


def _time(
    seconds: float,
    exposed: float,
    data: float,
    lane: float,
    strategy: str,
    shares: Sequence[float],
    updates: int,
) -> UpdateTime | None:
    if not np.isfinite(seconds):
        return None
    compute = float(np.maximum(0.0, seconds - exposed - data))
    model = model_seconds(strategy.partition(":")[0], compute, lane, shares)
    return UpdateTime(
        seconds=seconds,
        compute=compute,
        exposed=exposed,
        data=data,
        lane=lane,
        model=None if model is None else model + data,
        updates=updates,
    )


def model_seconds(strategy: str, compute: float, lane: float, shares: Sequence[float]) -> float | None:
    """Return the seconds of an update by the time model; None for a strategy without a row there, or without times.

    Args:
        strategy: Its name.
        compute: Of all micro-batches of an update.
        lane: Of all exchanges of an update, with steps and previews; without what left during the backward pass.
        shares: Micro-batches of each round, or anything proportional.
    """
    match strategy:
        case _ if not np.isfinite(compute + lane):
            return None
        case "ddp" | "zero1":
            return compute + lane
        case "dpu" | "wp":
            return max(compute, lane)
        case "acco" if sum(shares) > 0:
            return sum(max(compute * share / sum(shares), lane / len(shares)) for share in shares)
        case _:
            return None
