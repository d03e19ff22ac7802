"""Repeats the decisions of another run: what `Ready` and `Auto` chose, without their clocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stretto.echo.chooser import HeldT, Memoryless, Taken
from stretto.errors import ConfigError, OutOfTurn


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
