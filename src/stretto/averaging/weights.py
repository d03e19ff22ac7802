"""What each rank has contributed since each fragment left last: its share of every mean."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto.engine.report import RoundReport, in_rank_order


class Weights:
    """The account of what all ranks have contributed, the same on all of them.

    Args:
        rank: This one, of `world_size`.
        world_size: Ranks.
        fragments: Into how many the parameters are cut; bucket `i` belongs to fragment `i % fragments`.
        buckets: Of all fragments.
    """

    def __init__(self, rank: int, world_size: int, fragments: int, buckets: int) -> None:
        self._rank = rank
        self._buckets = buckets
        self._since = np.zeros((fragments, world_size))
        """What each rank has contributed since each fragment left last, up to the last departure of any."""
        self._left_with = np.zeros_like(self._since)
        """What each rank had contributed when each fragment left last, or when all replicas became their mean."""
        self._differ = np.zeros(fragments, dtype=bool)
        """Of each fragment: whether ranks hold their own values: it is in flight, or they kept a part at its arrival.
        """

    def launch(self, fragment: int, report: RoundReport) -> float | None:
        """Send a fragment; return this rank's share of it, or None if no rank has contributed since.

        Args:
            fragment: Which one.
            report: Of all rounds since the last departure of any.
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
        """A fragment has arrived, and ranks may have kept their own part."""
        self._differ[fragment] = keeps_own

    def unite(self, report: RoundReport) -> None:
        """All replicas have become their mean, with what `report` says."""
        self._left_with = self._contributed(report)
        self._since[:] = self._differ[:] = 0

    def begin_again(self) -> None:
        """All ranks hold the same, and no rank has contributed since."""
        for counts in (self._since, self._left_with, self._differ):
            counts[:] = 0

    def share(self, report: RoundReport) -> list[float] | None:
        """Return this rank's share of the mean of all replicas, by bucket; None where they are equal.

        Args:
            report: What each rank has contributed since the last departure.
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
        """Return all counts."""
        return {
            "weights": self._since.tolist(),
            "left_with": self._left_with.tolist(),
            "differ": self._differ.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self._since[:], self._left_with[:] = state["weights"], state["left_with"]
        self._differ[:] = state["differ"]

    def _contributed(self, report: RoundReport) -> NDArray[np.float64]:
        """Return what each rank has contributed since each fragment left, or where none has, until it left."""
        since = self._since + report.records["weight"]
        return np.where(since.any(axis=1, keepdims=True), since, self._left_with)

    def _shares(self, weights: NDArray[np.float64]) -> list[float]:
        """Return this rank's share of each row, by bucket; rank 0 has all of one without weight."""
        totals = [in_rank_order(row) for row in weights]
        shares = [
            float(row[self._rank]) / total if total else float(self._rank == 0)
            for row, total in zip(weights, totals, strict=True)
        ]
        return [shares[index % len(shares)] for index in range(self._buckets)]
