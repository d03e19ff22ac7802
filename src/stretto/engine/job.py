"""What crosses between the compute lane and the communication lane: jobs one way, landings the other."""

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from stretto.engine.roll_call import Attendance, RollCall, Vote, settings_text
from stretto.flat import GradientBuffer
from stretto.optimizer import Hyperparameters, ReducedGradient
from stretto.records import Incident

Shown = Literal["committed", "estimate"]
"""Which parameters the model holds."""


@dataclasses.dataclass(slots=True)
class Contribution:
    """What one rank has accumulated for one round, beside the gradient itself."""

    used: bytearray
    """One byte per parameter slot, set by the backward hooks."""
    loss_sum: Tensor
    """Σ w·loss, a float32 scalar on the device: read by the lane, so that no micro-batch waits for the host."""
    weight: float = 0.0
    samples: int = 0
    micro_batches: int = 0
    """Those with a weight above zero."""
    count: int = 0
    """All of them: what quotas count."""
    loss_weight: float = 0.0


@dataclasses.dataclass(slots=True)
class Job:
    """One round's work for the communication lane, which owns everything in it until the landing."""

    buffer: GradientBuffer
    contribution: Contribution
    statistics: list[Tensor]
    """Snapshot of the model's floating-point buffers, taken with the gradient."""
    changed: bytes
    """One byte per entry of `statistics`: changed on this rank since it was last averaged?"""
    agreed: list[Tensor]
    """The same buffers as ranks last agreed on them; not to be written."""
    vote: Vote
    hyperparameters: Hyperparameters
    reduction: "Reduction | None" = None
    """The outcome of a reduction performed ahead of take-off, for a checkpoint."""
    incidents: Sequence[Incident] = ()
    """What the compute lane has found damaged since the last take-off."""

    @property
    def is_finite(self) -> bool:
        """Whether the accumulated gradients are."""
        return all(bool(flat.sum().isfinite()) for flat in self.buffer.flats)

    def attendance(self, finite: bool, norm_squared: float) -> Attendance:
        """Return this rank's record for the roll call.

        Args:
            finite: Whether the gradients were when the round began.
            norm_squared: Of this rank's part of their sum.
        """
        contribution = self.contribution
        return Attendance(
            weight=contribution.weight,
            samples=contribution.samples,
            micro_batches=contribution.micro_batches,
            loss_sum=float(contribution.loss_sum),
            loss_weight=contribution.loss_weight,
            gradient_is_finite=finite,
            norm_squared=norm_squared,
            vote=self.vote,
            settings=zlib.crc32(settings_text(self.hyperparameters).encode()),
            used=bytes(contribution.used),
            changed=self.changed,
        )


@dataclasses.dataclass(slots=True)
class Reduction:
    """What a round's exchange of gradients gave."""

    gradient: ReducedGradient
    call: RollCall
    statistics: dict[int, Tensor]
    """Averages over ranks of those buffers that changed anywhere, by index."""
    skipped: bool
    """Left out of the update because a loss or gradient was not finite."""
    alone: bool = False
    """Whether this rank took its own gradients; where its round was left out, the call counts nothing of it."""
    met: bool = True
    """Whether all ranks took part; otherwise the call holds this rank alone."""

    def drains(self, vote: Vote) -> bool:
        """Return whether all who took part only hand over what is left; `vote` is this rank's."""
        votes = self.call.votes if self.met else [vote]
        return all(vote == Vote.DRAIN for vote in votes)


@dataclasses.dataclass(frozen=True, slots=True)
class Commit:
    """What is known about a committed update when its last round ends."""

    reductions: tuple[Reduction, ...]
    gradient_norm: float
    learning_rates: tuple[float, ...]
    round_index: int
    lane_seconds: float
    sent_bytes: int
    incidents: tuple[Incident, ...]
    """What guards have found since the previous commit, on any rank."""
    gap: int
    """Updates since replicas were last averaged; 0 where they do not differ."""
    interval: int | None
    """Updates from one average to the next, where the strategy chooses."""


@dataclasses.dataclass(frozen=True, slots=True)
class Landing:
    """What one job brings back."""

    buffer: GradientBuffer
    """Holds the values to install."""
    statistics: list[Tensor]
    """The job's snapshot of the model's buffers."""
    shown: Shown
    reduction: Reduction
    at_boundary: bool
    """Whether this round ended an update."""
    commit: Commit | None
    """Set where this round ended an update that stepped; None at a boundary without any weight."""


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What the model showed before the committed parameters took its place."""

    shown: Shown
    parameters: list[Tensor] | None
    """None where the committed parameters were shown already."""
    statistics: list[Tensor]
