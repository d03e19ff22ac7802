"""Measured reuse: the largest number of uses that costs no fresh batch, found once and then kept.

    e* = L / (C + A)

with L the loader's seconds per fresh batch, C the step's, A its exposed communication's. Beyond e* fresh batches that
the loader could deliver are thrown away for nothing. The number is frozen and saved, so that a resumed run does not
depend on the speed of the machine it resumes on.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.echo.chooser import HeldT, Taken
from stretto.echo.even import EvenChooser
from stretto.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Auto:
    """Measure for `window` fresh batches without echo, then use every batch as often as is free."""

    max_uses: float = 4.0
    """Uses of a batch at most, however slow the loader is."""
    window: int = 32
    """Fresh batches to measure over; at least twice what the loader's workers keep ready, or the measurement sees
    their stock instead of their speed."""
    skip: int = 4
    """First batches of the window that are left out: workers start, memory is new."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_uses < math.inf:
            raise ConfigError(f"max_uses must be a finite number of at least 1, found {self.max_uses}")
        if not 0 <= self.skip < self.window:
            raise ConfigError(f"expected 0 <= skip < window, found {self.skip} and {self.window}")

    @property
    def pool(self) -> int:
        """One: uses of a batch follow each other."""
        return 1

    @property
    def is_planned(self) -> bool:
        """No: decisions depend on what was measured."""
        return False

    def chooser(self, seed: int) -> "AutoChooser":
        """See `Plan.chooser`; there is nothing to draw."""
        return AutoChooser(self)


class AutoChooser:
    """Measures, then is an even plan."""

    def __init__(self, plan: Auto) -> None:
        self._plan = plan
        self._loads: list[float] = []
        self._uses: list[float] = []
        self._even = EvenChooser(1.0)
        self.frozen: float | None = None
        """Uses per fresh batch, once known."""

    @property
    def is_measuring(self) -> bool:
        """See `Chooser.is_measuring`."""
        return self.frozen is None

    def choose(self, step: int, held: Sequence[HeldT], is_ready: Callable[[], bool]) -> HeldT | None:
        """See `Chooser.choose`."""
        return self._even.choose(step, held, is_ready)

    def took(self, taken: Taken) -> None:
        """See `Chooser.took`."""
        self._even.took(taken)
        if self.frozen is None:
            self._measure(taken)

    def state_dict(self) -> dict[str, Any]:
        """See `Chooser.state_dict`; an unfinished measurement begins anew."""
        return {"frozen": self.frozen, **self._even.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Chooser.load_state_dict`."""
        self.frozen = state["frozen"]
        self._loads, self._uses = [], []
        self._even = EvenChooser(1.0 if self.frozen is None else self.frozen)
        self._even.load_state_dict(state)

    def _measure(self, taken: Taken) -> None:
        self._loads.append(taken.load_seconds)
        self._uses.append(taken.use_seconds)
        if len(self._loads) < self._plan.window:
            return
        self.frozen = free_uses(
            self._loads[self._plan.skip :], self._uses[self._plan.skip :], self._plan.max_uses
        )
        self._even = EvenChooser(self.frozen)


def free_uses(load_seconds: Sequence[float], use_seconds: Sequence[float], max_uses: float) -> float:
    """Return e*, from 1 to `max_uses`, rounded down to hundredths; nan counts as not measured.

    Loads are averaged, because what bursts deliver is their mean; of uses the median counts, because evaluations and
    checkpoints fall between batches too.
    """
    loads = [seconds for seconds in load_seconds if not math.isnan(seconds)]
    uses = [seconds for seconds in use_seconds if not math.isnan(seconds)]
    if not loads or not uses:
        return 1.0
    ratio = statistics.mean(loads) / max(statistics.median(uses), 1e-9)
    return max(1.0, math.floor(100 * min(ratio, max_uses)) / 100)
