"""A number that changes over a run: any callable of the step is a schedule, a plain number never changes.

With `u = step / steps`, held at 1 afterwards:

    Cosine       stop + (start - stop) (1 + cos pi u) / 2
    Linear       start + (stop - start) u
    MultiStep    values[k] from milestones[k - 1] on

Each rises or falls, as its ends say. A step is one batch handed out on this rank.
"""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass

from stretto.errors import ConfigError

Schedule = float | Callable[[int], float]
"""A constant, or the value at a step, from 0."""


@dataclass(frozen=True, slots=True)
class Cosine:
    """Half a cosine from `start` to `stop`."""

    start: float
    """Value at step 0."""
    stop: float
    """Value from step `steps` on."""
    steps: int
    """Length of the way, in batches handed out; at least 1."""

    def __post_init__(self) -> None:
        _check_steps(self.steps)

    def __call__(self, step: int) -> float:
        """Return the value at `step`."""
        share = (1 + math.cos(math.pi * min(1.0, step / self.steps))) / 2
        return self.stop + (self.start - self.stop) * share


@dataclass(frozen=True, slots=True)
class Linear:
    """A straight line from `start` to `stop`."""

    start: float
    """Value at step 0."""
    stop: float
    """Value from step `steps` on."""
    steps: int
    """Length of the way, in batches handed out; at least 1."""

    def __post_init__(self) -> None:
        _check_steps(self.steps)

    def __call__(self, step: int) -> float:
        """Return the value at `step`."""
        share = min(1.0, step / self.steps)
        return (1 - share) * self.start + share * self.stop  # exact at both ends


@dataclass(frozen=True, slots=True)
class MultiStep:
    """Constant pieces."""

    values: tuple[float, ...]
    """The value of each piece."""
    milestones: tuple[int, ...]
    """First step of each piece but the first, rising."""

    def __post_init__(self) -> None:
        if len(self.values) != len(self.milestones) + 1 or list(self.milestones) != sorted(self.milestones):
            raise ConfigError(
                f"expected rising milestones and one value more than those, found values {self.values} and "
                f"milestones {self.milestones}"
            )

    def __call__(self, step: int) -> float:
        """Return the value at `step`."""
        return self.values[bisect.bisect_right(self.milestones, step)]


def value_at(schedule: Schedule, step: int) -> float:
    """Return what `schedule` says of `step`."""
    return float(schedule(step) if callable(schedule) else schedule)


def _check_steps(steps: int) -> None:
    if steps < 1:
        raise ConfigError(f"a schedule needs at least 1 step, found {steps}")
