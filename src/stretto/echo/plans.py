"""Which batch comes next: the contract of a plan, and the plans that need no measurement.

What every plan answers: at each step, a fresh batch or one of those in hand.

Even reuse: every batch is used equally often, fractions spread by error diffusion.

With `e(t)` uses per fresh batch, step t earns `1 / e(t)` of a load, and a load is due when earnings exceed what was
spent. At constant e the uses of a batch are the floor or the ceiling of e, and n fresh batches make floor(n e) steps.

The rule of "Sharper Analysis of Data Echoing": load a fresh batch with probability p, or keep the current one.

    xi_t = fresh sample if coin(p_t) else xi_{t-1}

Uses of a batch are geometric with mean 1 / p, so at equal loads the averaged gradient has (2 - p) times the variance
that `Even` gives, and a long tail: with p = 0.2 one batch in ninety is used more than 20 times.

Reactive reuse: a fresh batch if one is ready, otherwise the least used of the last few.

The device never waits, and the loader never does either, whatever their speeds and their jitter. Which batch is used
when depends on time; a decision trace makes such a run repeatable (`Replay`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from stretto.errors import ConfigError
from stretto.randomness import coin
from stretto.schedules import Schedule, value_at


@dataclass(kw_only=True, slots=True)
class Held:
    """A batch in hand, as a plan sees it."""

    number: int
    """Fresh batches that came before it on this rank, over all epochs."""
    uses: int = 0
    """How often it has been handed out."""


HeldT = TypeVar("HeldT", bound=Held)


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """One batch handed out."""

    step: int
    """Batches handed out before it."""
    is_fresh: bool
    """Whether this was its first use."""
    load_seconds: float
    """What the loader took for it; nan for an echo."""
    use_seconds: float
    """From the former batch's being handed out to the request for this one; nan for the first."""


class Chooser(Protocol):
    """A plan at work: its options and what it must remember."""

    @property
    def is_measuring(self) -> bool:
        """Whether `use_seconds` must be true now, so that a device running behind the host is waited for."""
        ...

    def choose(self, step: int, held: Sequence[HeldT], is_ready: Callable[[], bool]) -> HeldT | None:
        """Return which batch to hand out; None for a fresh one. Changes nothing.

        Args:
            step: Batches handed out before.
            held: The last few fresh batches, oldest first; at least one, since an epoch begins with a fresh one.
            is_ready: Whether a fresh batch could be had without waiting.
        """
        ...

    def took(self, taken: Taken) -> None:
        """Take note of what was handed out: what `choose` said, unless an epoch began or the data had ended."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what it must remember, as plain values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember what another one remembered."""
        ...


class Memoryless:
    """What choosers share that decide from their arguments alone."""

    is_measuring = False

    def took(self, taken: Taken) -> None:
        """See `Chooser.took`."""

    def state_dict(self) -> dict[str, Any]:
        """See `Chooser.state_dict`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Chooser.load_state_dict`."""


class Plan(Protocol):
    """How often batches are used: a frozen dataclass of options."""

    @property
    def pool(self) -> int:
        """How many of the last fresh batches are kept for echoes; at least 1."""
        ...

    @property
    def is_planned(self) -> bool:
        """Whether decisions depend on seed and step alone, never on time."""
        ...

    def chooser(self, seed: int) -> Chooser:
        """Return a plan at work.

        Args:
            seed: Of its coins.
        """
        ...


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


@dataclass(frozen=True, slots=True)
class Ready:
    """Take a fresh batch if one is ready, otherwise the least used of the last `pool`."""

    pool: int = 12
    """Batches kept for echoes, and so the memory this costs. One batch alone would be used unevenly: with a loader of
    irregular speed some batches many times, others once. What leaves the pool before `max_uses` is lost to a long
    pause: with 8, eight ranks waited 3 % of the time for loaders 2.5 times as slow as a step, with 12 hardly ever."""
    max_uses: int = 4
    """Uses of a batch at most: where all in the pool have had theirs, the device waits after all. Four passes over
    the same data are about as good as fresh ones; many more are not."""

    def __post_init__(self) -> None:
        if self.pool < 1 or self.max_uses < 1:
            raise ConfigError(f"pool and max_uses must be at least 1, found {self.pool} and {self.max_uses}")

    @property
    def is_planned(self) -> bool:
        """No: the loader's speed decides."""
        return False

    def chooser(self, seed: int) -> "ReadyChooser":
        """See `Plan.chooser`; there is nothing to draw."""
        return ReadyChooser(self.max_uses)


class ReadyChooser(Memoryless):
    """Looks at the loader and at the uses so far."""

    def __init__(self, max_uses: int) -> None:
        self._max_uses = max_uses

    def choose(self, step: int, held: Sequence[HeldT], is_ready: Callable[[], bool]) -> HeldT | None:
        """See `Chooser.choose`."""
        if is_ready():
            return None
        least = least_used(held)
        return least if least.uses < self._max_uses else None


def least_used(held: Sequence[HeldT]) -> HeldT:
    """Return the batch with the fewest uses, the oldest of several."""
    return min(held, key=lambda one: (one.uses, one.number))
