"""The learning rate over the updates: a linear warm-up, then a half cosine down to a floor."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from stretto import errors


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Factor on the learning rate as a function of the committed updates."""

    warmup: int = 20
    """Updates until the full rate is reached; at most a tenth of the run where its length is known."""

    floor: float = 0.1
    """Factor at the end of the cosine, between 0 and 1. Runs that only time ends stay at the full rate; 1
    does that to all."""

    def __post_init__(self) -> None:
        if self.warmup < 0:
            raise errors.ConfigError(f"warmup must not be negative, found {self.warmup} updates")
        if not 0 <= self.floor <= 1:
            raise errors.ConfigError(
                f"the floor of the learning rate is a factor in [0, 1], found {self.floor}"
            )

    def factor(self, updates: int | None) -> Callable[[int], float]:
        """The factor for the update after `done` committed ones.

            warm-up   (done + 1) / warmup
            cosine    floor + (1 - floor) * (1 + cos(pi * progress)) / 2

        Args:
            updates: Length of the run, or None where it is not known.
        """
        warmup = self.warmup if updates is None else min(self.warmup, updates // 10)

        def at(done: int) -> float:
            if done < warmup:
                return (done + 1) / warmup
            if updates is None:
                return 1.0
            progress = min(1.0, (done - warmup) / max(1, updates - warmup))
            return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress)) / 2

        return at

    def build(self, optimizer: Optimizer, updates: int | None) -> LambdaLR:
        """A scheduler of `optimizer`, to be stepped once per committed update."""
        # A closure, not an object: LambdaLR saves the state of objects, and a run may be resumed for longer.
        return LambdaLR(optimizer, self.factor(updates))
