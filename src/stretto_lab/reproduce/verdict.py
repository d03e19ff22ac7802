"""What a claim's verdict is: derived from measured intervals by one rule, never typed.

Note [The rule]
    A claim is made of effects: numbers such as points of accuracy lost. Of each the paper says between which limits it
    lies (`least`, `most`), and perhaps what it is. With the 95 % interval of our seeds

        holds            the interval lies within the limits, and it contains the paper's number, if there is one; where
                         that is a best case ("up to"), all of the interval is as good
        holds in shape   the interval lies within the limits, the paper's number does not lie in it
        does not hold    the interval lies outside of the limits
        cannot be checked  the interval contains a limit, or there is none: too few seeds, or no runs

    A record has the verdict of the effect that speaks most against it. Intervals are of paired differences or ratios,
    seed by seed, and are not widened for the number of comparisons.
"""

import dataclasses
import math
from collections.abc import Iterable
from enum import StrEnum

from stretto_lab.reproduce.intervals import Interval


class Verdict(StrEnum):
    """What we say of a claim."""

    HOLDS = "holds"
    IN_SHAPE = "holds in shape"
    UNCHECKED = "cannot be checked"
    FAILS = "does not hold"


_WORSE = (Verdict.HOLDS, Verdict.IN_SHAPE, Verdict.UNCHECKED, Verdict.FAILS)
"""From what speaks least against a claim to what speaks most."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a paper says of one number."""

    least: float = -math.inf
    """The number is not below it."""
    most: float = math.inf
    """Nor above it."""
    paper: float | None = None
    """The paper's own number; None where it has words alone."""
    is_best: bool = False
    """Whether the paper's number is its best case, the largest one."""


def judge(found: Interval | None, limits: Limits) -> Verdict:
    """Return the verdict on one effect; see Note [The rule].

    Args:
        found: Of the seeds that were run; None where one of them has no value.
        limits: What the paper says.
    """
    if found is None or "low" not in found:
        return Verdict.UNCHECKED
    low, high = found["low"], found["high"]
    if high < limits.least or low > limits.most:
        return Verdict.FAILS
    if low < limits.least or high > limits.most:
        return Verdict.UNCHECKED
    if limits.paper is None:
        return Verdict.HOLDS
    is_met = low >= limits.paper if limits.is_best else low <= limits.paper <= high
    return Verdict.HOLDS if is_met else Verdict.IN_SHAPE


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict that speaks most against a claim; without any it cannot be checked."""
    return max(verdicts, key=_WORSE.index, default=Verdict.UNCHECKED)
