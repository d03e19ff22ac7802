"""What a run reports: one record per committed update."""

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One committed optimizer update, the same on every rank but for this rank's own times and bytes."""

    step: int
    """Committed updates so far, from 1: what learning-rate schedules count."""
    round_index: int
    """Exchanges so far, from 0; advances also where nothing was committed."""
    samples: int
    """Samples behind this update, over all ranks."""
    weight: float
    """Total weight behind this update (micro-batches, or tokens where the user weighs by tokens)."""
    loss: float
    """Mean loss over all ranks' micro-batches, weighted; nan where `step` was given no loss."""
    gradient_norm: float
    """Global 2-norm of the mean gradient, before clipping."""
    staleness: int
    """Committed updates between the parameters a gradient was taken at and those it was applied to."""
    micro_batches: tuple[int, ...]
    """Micro-batches behind this update, by rank."""
    rounds: tuple[tuple[int, ...], ...]
    """Micro-batches by round and rank: with these counts a run can be replayed to the bit."""
    seconds: float
    """Wall time since the previous update was returned, on this rank."""
    lane_seconds: float
    """Time the communication lane was busy with this update, on this rank."""
    exposed_seconds: float
    """Part of `seconds` in which this rank's compute lane waited for the communication lane."""
    sent_bytes: int
    """Bytes this rank handed to collectives for other ranks, for this update."""
    learning_rates: tuple[float, ...]
    """Learning rate of each parameter group, as this update used it."""
    skipped_rounds: int
    """Rounds left out since the previous update because a loss or gradient was not finite."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON values; a number that is not finite becomes None."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {name: None if _is_lost(value) else value for name, value in fields.items()}


def _is_lost(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
