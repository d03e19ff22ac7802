"""What one rank has seen since the last update, and the sum of it over ranks."""

import dataclasses
import math
from typing import Literal

import torch
from torch import Tensor


@dataclasses.dataclass(kw_only=True, slots=True)
class Tally:
    """One rank's micro-batches since the last update."""

    micro_batches: int = 0
    """How many were run, those of weight zero included."""
    counted: int = 0
    """How many had a weight."""
    weight: float = 0.0
    loss_sum: float = 0.0
    """Sum of weight times loss."""
    samples: int = 0
    stop: bool = False
    """Whether this rank wants to end."""
    exhausted: bool = False
    """Whether this rank's data have ended."""

    def add(self, loss: Tensor, weight: float, samples: int) -> None:
        """Count one micro-batch."""
        self.micro_batches += 1
        if weight > 0:
            self.counted += 1
            self.weight += weight
            self.loss_sum += weight * float(loss.detach())
            self.samples += samples

    def as_tensor(self) -> Tensor:
        """What the other ranks need to know, in float64, which holds all counts exactly."""
        told = (self.counted, self.weight, self.loss_sum, self.samples, self.stop, self.exhausted)
        return torch.tensor(told, dtype=torch.float64)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """The tallies of all ranks."""

    micro_batches: tuple[int, ...]
    """How many had a weight, by rank."""
    weight: float
    loss: float
    """Weighted mean; nan without any weight."""
    samples: int
    stop: bool
    """Whether any rank wants to end."""
    exhausted: tuple[bool, ...]
    """Whose data have ended, by rank."""

    @classmethod
    def of(cls, tallies: Tensor) -> "Totals":
        """Sum up the rows of `Tally.as_tensor`, one per rank."""
        counted, weights, loss_sums, samples, stops, exhausted = tallies.t().tolist()
        weight = math.fsum(weights)
        return cls(
            micro_batches=tuple(map(int, counted)),
            weight=weight,
            loss=math.fsum(loss_sums) / weight if weight > 0 else math.nan,
            samples=int(sum(samples)),
            stop=any(stops),
            exhausted=tuple(map(bool, exhausted)),
        )

    def ends(self, until: Literal["any", "all"]) -> bool:
        """Whether the job ends with this update."""
        return self.stop or (any(self.exhausted) if until == "any" else all(self.exhausted))
