"""What one rank has contributed since replicas were last averaged."""

import dataclasses

from stretto.engine.job import Contribution
from stretto.engine.roll_call import Attendance


@dataclasses.dataclass(slots=True)
class Window:
    """Sums over this rank's own rounds."""

    used: bytearray
    """One byte per parameter slot: used since the last average?"""
    rounds: int = 0
    """All of them, the same on every rank: those that were left out, or had no weight, count."""
    weight: float = 0.0
    samples: int = 0
    micro_batches: int = 0
    loss_sum: float = 0.0
    loss_weight: float = 0.0

    def add(self, contribution: Contribution) -> None:
        """Count one round's contribution."""
        self.weight += contribution.weight
        self.samples += contribution.samples
        self.micro_batches += contribution.micro_batches
        self.loss_sum += float(contribution.loss_sum)
        self.loss_weight += contribution.loss_weight
        self.used = bytearray(a | b for a, b in zip(self.used, contribution.used, strict=True))

    def attend(self, attendance: Attendance) -> Attendance:
        """Return what this rank says at an average, from what it would say of the last round alone."""
        return dataclasses.replace(
            attendance,
            weight=self.weight,
            samples=self.samples,
            micro_batches=self.micro_batches,
            loss_sum=self.loss_sum,
            loss_weight=self.loss_weight,
            used=bytes(self.used),
        )
