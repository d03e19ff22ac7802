"""Schedules: numbers that change over a run.

A schedule is a plain number, which never changes, or any function of an index. What the index counts is said where
the schedule is used: an echo plan counts the updates that this rank has begun, `LocalSGD` counts rounds.

Three functions are given here. With `u = min(1, index / steps)`:

    Cosine       stop + (start - stop) (1 + cos(pi u)) / 2
    Linear       start + (stop - start) u
    MultiStep    values[k] from milestones[k - 1] on
"""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass

from stretto.errors import ConfigError

Schedule = float | Callable[[int], float]
"""A number, or a function that returns the number at an index. Indices start at 0."""


def value_at(schedule: Schedule, index: int) -> float:
    """Return the value of `schedule` at `index`."""
    return float(schedule(index) if callable(schedule) else schedule)


@dataclass(frozen=True, slots=True)
class Ramp:
    """What `Cosine` and `Linear` have in common: both ends, and how far they are apart."""

    start: float
    """Value at index 0."""
    stop: float
    """Value at index `steps` and after it; it may be above or below `start`."""
    steps: int
    """Number of indices from `start` to `stop`; at least 1."""

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"{type(self).__name__}(steps={self.steps}): a schedule needs at least 1 step")


class Cosine(Ramp):
    """From `start` to `stop` along half a cosine: slow at both ends, fast in the middle."""

    __slots__ = ()

    def __call__(self, index: int) -> float:
        """Return the value at `index`."""
        share = (1 + math.cos(math.pi * min(1.0, index / self.steps))) / 2
        return self.stop + (self.start - self.stop) * share


class Linear(Ramp):
    """From `start` to `stop` along a straight line."""

    __slots__ = ()

    def __call__(self, index: int) -> float:
        """Return the value at `index`."""
        share = min(1.0, index / self.steps)
        return (1 - share) * self.start + share * self.stop  # exact at both ends


@dataclass(frozen=True, slots=True)
class MultiStep:
    """A number of constant values, one after the other."""

    values: tuple[float, ...]
    """The values in their order; one more than there are milestones."""
    milestones: tuple[int, ...]
    """The index at which each value but the first begins, in rising order."""

    def __post_init__(self) -> None:
        if len(self.values) != len(self.milestones) + 1 or list(self.milestones) != sorted(self.milestones):
            raise ConfigError(
                "MultiStep: expected rising milestones, and one value more than milestones, found values "
                f"{self.values} and milestones {self.milestones}"
            )

    def __call__(self, index: int) -> float:
        """Return the value at `index`."""
        return self.values[bisect.bisect_right(self.milestones, index)]
