"""The rule of "Sharper Analysis of Data Echoing": load a fresh batch with probability p, or keep the current one.

    xi_t = fresh sample if coin(p_t) else xi_{t-1}

Uses of a batch are geometric with mean 1 / p, so at equal loads the averaged gradient has (2 - p) times the variance
that `Even` gives, and a long tail: with p = 0.2 one batch in ninety is used more than 20 times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stretto.coin import coin
from stretto.echo.chooser import HeldT, Memoryless
from stretto.echo.schedule import Schedule, value_at
from stretto.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Bernoulli:
    """Load a fresh batch with probability `p` at every step."""

    p: Schedule = 0.5
    """Probability of a load, above 0 and at most 1; or a schedule of it over the batches handed out."""
    max_uses: int | None = None
    """After so many uses a fresh batch is loaded whatever the coin says; None is the paper's rule."""

    def __post_init__(self) -> None:
        if not callable(self.p):
            _probability(self.p, 0)
        if self.max_uses is not None and self.max_uses < 1:
            raise ConfigError(f"max_uses must be at least 1, found {self.max_uses}")

    @property
    def pool(self) -> int:
        """One: uses of a batch follow each other."""
        return 1

    @property
    def is_planned(self) -> bool:
        """Yes: coins are hashes of seed and step."""
        return True

    def chooser(self, seed: int) -> "BernoulliChooser":
        """See `Plan.chooser`."""
        return BernoulliChooser(self, seed)


class BernoulliChooser(Memoryless):
    """Throws the coins."""

    def __init__(self, plan: Bernoulli, seed: int) -> None:
        self._plan = plan
        self._seed = seed

    def choose(self, step: int, held: Sequence[HeldT], is_ready: Callable[[], bool]) -> HeldT | None:
        """See `Chooser.choose`."""
        if self._plan.max_uses is not None and held[-1].uses >= self._plan.max_uses:
            return None
        return None if coin(self._seed, "echo", step, _probability(self._plan.p, step)) else held[-1]


def _probability(p: Schedule, step: int) -> float:
    value = value_at(p, step)
    if not 0 < value <= 1:
        raise ConfigError(f"step {step}: expected a probability of loading with 0 < p <= 1, found {value}")
    return value
