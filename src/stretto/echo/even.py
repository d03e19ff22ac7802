"""Even reuse: every batch is used equally often, fractions spread by error diffusion.

With `e(t)` uses per fresh batch, step t earns `1 / e(t)` of a load, and a load is due when earnings exceed what was
spent. At constant e the uses of a batch are the floor or the ceiling of e, and n fresh batches make floor(n e) steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from stretto.echo.chooser import HeldT, Taken
from stretto.echo.schedule import Schedule, value_at
from stretto.errors import ConfigError

LOAD = 1 << 62
"""One load, in units of credit: integers, so that sums neither drift nor depend on the machine."""


@dataclass(frozen=True, slots=True)
class Even:
    """Use every batch `uses` times; 2.5 is twice and three times in turn."""

    uses: Schedule = 2.0
    """Uses per fresh batch, at least 1; or a schedule of them over the batches handed out."""

    def __post_init__(self) -> None:
        if not callable(self.uses):
            _earned(self.uses, 0)

    @property
    def pool(self) -> int:
        """One: uses of a batch follow each other."""
        return 1

    @property
    def is_planned(self) -> bool:
        """Yes: no coin and no clock."""
        return True

    def chooser(self, seed: int) -> "EvenChooser":
        """See `Plan.chooser`; there is nothing to draw."""
        return EvenChooser(self.uses)


class EvenChooser:
    """Counts what has been earned and not been spent."""

    is_measuring = False

    def __init__(self, uses: Schedule) -> None:
        self._uses = uses
        self._credit = 0
        """Loads earned less loads spent, in units of `LOAD`; from -1 to 0."""

    def choose(self, step: int, held: Sequence[HeldT], is_ready: Callable[[], bool]) -> HeldT | None:
        """See `Chooser.choose`."""
        return None if self._credit + _earned(self._uses, step) > 0 else held[-1]

    def took(self, taken: Taken) -> None:
        """See `Chooser.took`."""
        earned = _earned(self._uses, taken.step)
        credit = self._credit + earned
        if taken.is_fresh:
            # An epoch may begin before a load is due; the remainder of the former batch's uses is forgotten.
            self._credit = (credit if credit > 0 else earned) - LOAD
        else:
            self._credit = min(credit, 0)

    def state_dict(self) -> dict[str, Any]:
        """See `Chooser.state_dict`."""
        return {"credit": self._credit}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Chooser.load_state_dict`."""
        self._credit = int(state["credit"])


def _earned(uses: Schedule, step: int) -> int:
    """Return `1 / uses` of a load, rounded down, which makes whole uses come out whole."""
    value = value_at(uses, step)
    if not 1 <= value < float("inf"):
        raise ConfigError(
            f"step {step}: a fresh batch is used at least once: expected uses >= 1, found {value}"
        )
    numerator, denominator = value.as_integer_ratio()
    return LOAD * denominator // numerator
