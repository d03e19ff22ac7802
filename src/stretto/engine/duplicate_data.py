"""A look at whether ranks read the same batches, in a job's first rounds: the commonest fault of a new loop.

Ranks that train the same parameters on the same batch have the same loss to the bit, and others hardly ever have.
Losses come with the round reports anyway, so nothing is sent or waited for. A loss that stays what it is, as of a model
whose head begins with zeros, says nothing and is passed over.
"""

import logging
import math

import numpy as np
from numpy.typing import NDArray

_log = logging.getLogger("stretto")

ROUNDS = 4
"""With equal losses in a row, which must differ from round to round: chance has to repeat itself as often."""
MOST_ROUNDS = 64
"""After which the check ends."""


class DuplicateDataCheck:
    """Which ranks have had the same losses so far.

    Args:
        ranks: How many there are.
    """

    def __init__(self, ranks: int) -> None:
        self._labels = [0] * ranks
        """Of each rank, the first one with the same losses."""
        self._last = [math.nan] * ranks
        self._seen = self._counted = 0

    def look(self, records: NDArray[np.void], where: str) -> bool:
        """Take a round's reports; return whether to look at the next one.

        Args:
            records: Of `RoundReport`; all ranks hold the same.
            where: Rank and step, for the message, which rank 0 gives.
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
