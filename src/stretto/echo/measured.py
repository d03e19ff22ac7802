"""Plans that follow a clock or a record: `Auto` measures, `Replay` repeats.

Measured reuse: the largest number of uses that costs no fresh batch, found once and then kept.

    e* = L / (C + A)

with L the loader's seconds per fresh batch, C the step's, A its exposed communication's. Beyond e* fresh batches that
the loader could deliver are thrown away for nothing. The number is frozen and saved, so that a resumed run does not
depend on the speed of the machine it resumes on.

Repeats the decisions of another run: what `Ready` and `Auto` chose, without their clocks.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.echo.plans import EvenChooser, HeldT, Memoryless, Taken
from stretto.errors import ConfigError, OutOfTurn


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


@dataclass(frozen=True, slots=True)
class Replay:
    """Hand out batches in the order of `decisions`."""

    decisions: tuple[int, ...]
    """At every step, the number of the batch that was used: `EchoLoader.decisions` of the run to repeat."""

    def __post_init__(self) -> None:
        newest = -1
        for step, number in enumerate(self.decisions):
            if not 0 <= number <= newest + 1:
                raise ConfigError(
                    f"decision {step}: batch {number} cannot follow batch {newest}, the last fresh one: expected a "
                    "trace of one rank from its first step on"
                )
            newest = max(newest, number)

    @property
    def pool(self) -> int:
        """As many batches as any decision reaches back."""
        reach, newest = 1, 0
        for number in self.decisions:
            newest = max(newest, number)
            reach = max(reach, newest - number + 1)
        return reach

    @property
    def is_planned(self) -> bool:
        """No: how far the trace reaches is no property of the data."""
        return False

    def chooser(self, seed: int) -> "ReplayChooser":
        """See `Plan.chooser`; there is nothing to draw."""
        return ReplayChooser(self.decisions)


class ReplayChooser(Memoryless):
    """Reads the decisions."""

    def __init__(self, decisions: Sequence[int]) -> None:
        self._decisions = decisions

    def choose(self, step: int, held: Sequence[HeldT], is_ready: Callable[[], bool]) -> HeldT | None:
        """See `Chooser.choose`."""
        if step >= len(self._decisions):
            return None  # the data may end where the trace does
        number = self._decisions[step]
        return next((one for one in held if one.number == number), None)

    def took(self, taken: Taken) -> None:
        """See `Chooser.took`."""
        if taken.step >= len(self._decisions):
            raise OutOfTurn(
                f"step {taken.step}: the trace to replay ends after {len(self._decisions)} decisions"
            )
