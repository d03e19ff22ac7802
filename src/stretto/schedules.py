"""Schedules: numbers that change over a run.

A schedule is a constant number or any function of an index. The user of the schedule defines the index: an echo plan
counts the updates that this rank has begun, `LocalSGD` counts rounds.

This module has three functions. With `u = min(1, index / steps)`:

    Cosine       stop + (start - stop) (1 + cos(pi u)) / 2
    Linear       start + (stop - start) u
    MultiStep    values[k] from milestones[k - 1] on

As text: cosine(START,STOP[,UPDATES]), linear(START,STOP[,UPDATES]) or multistep(V0,UPDATE1,V1,...). A schedule without
UPDATES extends over the whole run; `over` sets its length.
"""

import bisect
import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from stretto.errors import ConfigError
from stretto.fields import read_value

Schedule = float | Callable[[int], float]
"""A number, or a function that returns the number at an index. Indices start at 0."""
Length = int | Callable[[], float]
"""Number of indices in a run; if not known, a function that returns the finished share of the run."""


def value_at(schedule: Schedule, index: int) -> float:
    """Return the value of `schedule` at `index`."""
    return float(schedule(index) if callable(schedule) else schedule)


@dataclass(frozen=True, slots=True)
class Ramp:
    """The common part of `Cosine` and `Linear`: both end values, and the number of steps between them."""

    start: float
    """Value at index 0."""
    stop: float
    """Value at index `steps` and after it; it may be above or below `start`."""
    steps: int | None
    """Number of indices from `start` to `stop`; at least 1. None is the length of the run, which `over` sets."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"{type(self).__name__}(steps={self.steps}): a schedule needs at least 1 step")

    def _done(self, index: float) -> float:
        """Return the share of the steps before `index`."""
        if self.steps is None:
            name = type(self).__name__.lower()
            raise ConfigError(
                f"{name}({self.start:g},{self.stop:g}) needs its number of updates as a third value: the run's length "
                "is not known"
            )
        return min(1.0, index / self.steps)


class Cosine(Ramp):
    """From `start` to `stop` along half a cosine: slow at both ends, fast in the middle."""

    __slots__ = ()

    def __call__(self, index: float) -> float:
        """Return the value at `index`."""
        share = (1 + math.cos(math.pi * self._done(index))) / 2
        return self.stop + (self.start - self.stop) * share


class Linear(Ramp):
    """From `start` to `stop` along a straight line."""

    __slots__ = ()

    def __call__(self, index: float) -> float:
        """Return the value at `index`."""
        share = self._done(index)
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


@dataclass(frozen=True, slots=True)
class Along:
    """A ramp along a run of unknown length, by the finished share of the run."""

    ramp: Ramp
    """The ramp, with one step."""
    share: Callable[[], float] = dataclasses.field(repr=False)
    """Returns the finished share, from 0 to 1."""

    def __call__(self, index: int) -> float:
        """Return the current value; `index` is ignored."""
        return value_at(self.ramp, self.share())  # type: ignore[arg-type]  # a ramp takes any number


def over(schedule: Schedule, length: Length | None) -> Schedule:
    """Return `schedule` stretched over a whole run, if it has no number of steps.

    Args:
        schedule: Any schedule.
        length: Length of the run; None if unknown.

    Raises:
        ConfigError: The schedule names no steps, and `length` is None.
    """
    if not isinstance(schedule, Ramp) or schedule.steps is not None:
        return schedule
    if callable(length):
        return Along(dataclasses.replace(schedule, steps=1), length)
    if length is None:
        value_at(schedule, 0)  # refuses
    return dataclasses.replace(schedule, steps=length)


_FORM = re.compile(r"(cosine|linear|multistep)\(([-+.\deE,]+)\)")


def parse_schedule(text: str) -> Schedule:
    """Read a number, or a schedule in the form that this module's docstring gives.

    Raises:
        ConfigError: The text has another form.
    """
    if "(" not in text:
        return float(read_value(text, float))
    match = _FORM.fullmatch(text.replace(" ", ""))
    if match is None:
        raise ConfigError(
            f"cannot read the schedule {text!r}: expected cosine(START,STOP[,UPDATES]), linear(START,STOP[,UPDATES]) "
            "or multistep(VALUE,UPDATE,VALUE,...)"
        )
    numbers = [float(read_value(number, float)) for number in match[2].split(",")]
    if match[1] == "multistep":
        return MultiStep(tuple(numbers[::2]), tuple(int(step) for step in numbers[1::2]))
    if len(numbers) not in (2, 3):
        raise ConfigError(f"{text!r}: expected START,STOP or START,STOP,UPDATES, found {len(numbers)} values")
    kind = Cosine if match[1] == "cosine" else Linear
    return kind(numbers[0], numbers[1], int(numbers[2]) if len(numbers) == 3 else None)
