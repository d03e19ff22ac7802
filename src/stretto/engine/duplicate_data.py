"""A check in a job's first rounds whether ranks read the same batches, the most common fault of a new loop.

Ranks that train the same parameters on the same batch have the same loss to the bit, and others hardly ever have. The
round reports contain the losses, so the check sends nothing and waits for nothing. It skips a constant loss, as in a
model whose head starts with zeros, because that proves nothing.
"""

import logging
import math

import numpy as np
from numpy.typing import NDArray

_log = logging.getLogger("stretto")

ROUNDS = 4
"""Number of consecutive rounds with equal losses that are evidence; the losses must differ between rounds."""
MOST_ROUNDS = 64
"""Number of rounds after which the check ends."""


class DuplicateDataCheck:
    """Groups of ranks with the same losses so far.

    Args:
        ranks: Number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self._labels = [0] * ranks
        """By rank: the first rank with the same losses."""
        self._last = [math.nan] * ranks
        self._seen = self._counted = 0

    def look(self, records: NDArray[np.void], where: str) -> bool:
        """Compare a round's reports; return whether to compare the next round's.

        Args:
            records: Records of `RoundReport`, equal on all ranks.
            where: Rank and step, for rank 0's message.
        """
        self._seen += 1
        losses = (records["loss_sum"] / np.maximum(records["loss_weight"], 1e-300)).tolist()
        if not (records["loss_weight"] > 0).all() or not all(map(math.isfinite, losses)):
            return self._seen < MOST_ROUNDS
        if any(loss == last for loss, last in zip(losses, self._last, strict=True)):
            return self._seen < MOST_ROUNDS
        self._last = losses
        first: dict[tuple[int, float], int] = {}
        self._labels = [
            first.setdefault(both, rank) for rank, both in enumerate(zip(self._labels, losses, strict=True))
        ]
        if len(set(self._labels)) == len(losses):
            return False
        self._counted += 1
        if self._counted < ROUNDS:
            return self._seen < MOST_ROUNDS
        alike = [rank for rank, label in enumerate(self._labels) if self._labels.count(label) > 1]
        _log.warning(
            "%s: the losses of ranks %s have been equal to the bit in %d rounds: do these ranks read the same batches? "
            "Give each rank its own part of the data, as torch.utils.data.DistributedSampler does",
            where,
            alike,
            ROUNDS,
        )
        return False
