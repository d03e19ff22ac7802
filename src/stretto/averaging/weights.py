"""The ranks' contributions since each fragment was last sent, which give their shares of every mean."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.engine.report import RoundReport, in_rank_order


class Weights:
    """The contributions of all ranks; equal on all of them.

    Args:
        rank: This rank, of `world_size`.
        world_size: Number of ranks.
        fragments: Number of fragments; bucket `i` belongs to fragment `i % fragments`.
        buckets: Number of buckets of all fragments.
    """

    def __init__(self, rank: int, world_size: int, fragments: int, buckets: int) -> None:
        self._rank = rank
        self._buckets = buckets
        # By fragment and rank: the contribution between the fragment's last launch and the last launch of all.
        self._since = np.zeros((fragments, world_size))
        # Each rank's contribution when each fragment was last sent, or when all replicas became their mean.
        self._left_with = np.zeros_like(self._since)
        # By fragment: whether ranks hold different values, in flight or after an arrival that kept some.
        self._differ = np.zeros(fragments, dtype=bool)

    def launch(self, fragment: int, report: RoundReport) -> float | None:
        """Record a launch; return this rank's share of the mean, or None if no rank has contributed since the last one.

        Args:
            fragment: Index of the fragment.
            report: The report of all rounds since the last launch of any fragment.
        """
        self._since += report.records["weight"]
        weights = self._since[fragment].copy()
        self._since[fragment] = 0
        total = in_rank_order(weights)
        if not total > 0:
            return None
        self._left_with[fragment], self._differ[fragment] = weights, True
        return float(weights[self._rank]) / total

    def land(self, fragment: int, *, keeps_own: bool) -> None:
        """Record that the fragment has arrived; `keeps_own`: ranks kept a part of the values that they had."""
        self._differ[fragment] = keeps_own

    def unite(self, report: RoundReport) -> None:
        """Record that all replicas have become their mean, after the contributions in `report`."""
        self._left_with = self._contributed(report)
        self._since[:] = self._differ[:] = 0

    def begin_again(self) -> None:
        """Record that all ranks hold equal values, and that no rank has contributed since."""
        for counts in (self._since, self._left_with, self._differ):
            counts[:] = 0

    def share(self, report: RoundReport) -> list[float] | None:
        """Return this rank's share of the mean of all replicas, by bucket; None if they are equal.

        Args:
            report: Each rank's contributions since the last launch.
        """
        is_idle = ~(self._since + report.records["weight"]).any(axis=1)
        # A fragment that has landed, and to which nobody has contributed, is equal on all ranks: one of them sends it.
        is_equal = is_idle & ~self._differ
        if is_equal.all():
            return None
        return self._shares(np.where(is_equal[:, np.newaxis], 0.0, self._contributed(report)))

    def share_of_state(self, report: RoundReport) -> list[float]:
        """Return this rank's share of the mean optimizer state, by bucket: no arrival makes states equal."""
        return self._shares(self._contributed(report))

    def state_dict(self) -> dict[str, Any]:
        return {
            "weights": self._since.tolist(),
            "left_with": self._left_with.tolist(),
            "differ": self._differ.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of `state_dict`."""
        self._since[:], self._left_with[:] = state["weights"], state["left_with"]
        self._differ[:] = state["differ"]

    def _contributed(self, report: RoundReport) -> NDArray[np.float64]:
        """Return each rank's contribution since each fragment was sent, or, if there is none, its earlier
        contribution.
        """
        since = self._since + report.records["weight"]
        return np.where(since.any(axis=1, keepdims=True), since, self._left_with)

    def _shares(self, weights: NDArray[np.float64]) -> list[float]:
        """Return this rank's share of each row, by bucket; rank 0 gets the whole of a row without weight."""
        totals = [in_rank_order(row) for row in weights]
        shares = [
            float(row[self._rank]) / total if total else float(self._rank == 0)
            for row, total in zip(weights, totals, strict=True)
        ]
        return [shares[index % len(shares)] for index in range(self._buckets)]
