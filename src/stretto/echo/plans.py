"""Plans: which batch is used at each step, a fresh one or one that is held.

A `Plan` holds the options. Its `Selector` decides step by step, and remembers what it needs for that. A step is one
batch handed out on this rank, counted from 0 over all epochs.

    Even         every batch the same number of times
    Bernoulli    a fresh batch with a given probability
    Ready        a fresh batch if one is ready, a held one if not
    Replay       the decisions of another run
    Auto         as many uses as cost nothing, measured in the run (see `measured.py`)
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from stretto.echo.buffer import HeldBatch
from stretto.errors import ConfigError, OutOfTurn
from stretto.fields import check_at_least, check_fields, did_you_mean
from stretto.randomness import coin
from stretto.schedules import Schedule, value_at


class Plan(ABC):
    """How often batches are used; a subclass is a frozen dataclass of options."""

    __slots__ = ()

    @property
    def pool(self) -> int:
        """Number of fresh batches that are held for further uses: the last ones, at least 1."""
        return 1

    @property
    def is_predictable(self) -> bool:
        """Whether seed and step alone decide, so that the length of an epoch is known before it begins."""
        return True

    @abstractmethod
    def selector(self, seed: int) -> "Selector":
        """Return a new selector; `seed` is that of its random draws."""


def check_plan(plan: object) -> None:
    """Raise ConfigError unless `plan` is a plan, and say which one was probably meant."""
    if isinstance(plan, Plan):
        return
    meant = ""
    if isinstance(plan, type) and issubclass(plan, Plan):
        meant = f"; did you mean {plan.__name__}()?"
    elif isinstance(plan, Real):
        meant = f"; did you mean Even({plan})?"
    elif isinstance(plan, str):
        meant = did_you_mean(plan.capitalize(), (kind.__name__ for kind in Plan.__subclasses__()))
    raise ConfigError(
        f"EchoLoader(plan={plan!r}): expected a plan, such as Ready(), Even(2) or Auto(){meant}"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """What happened at one step."""

    step: int
    """Batches handed out before this one."""
    is_fresh: bool
    """Whether the batch was handed out for the first time."""
    load_seconds: float
    """Time that the bare loader took for the batch; nan if it was held."""
    use_seconds: float
    """Time that the caller spent on the previous batch, until it asked for this one; nan at the first step."""


class Selector:
    """Selects the batch of every step. A subclass needs `select`, and the other methods if it remembers anything."""

    is_measuring: bool = False
    """Whether `StepRecord.use_seconds` is needed now. A device that runs behind the host is then waited for."""

    def select(self, step: int, held: Sequence[HeldBatch], is_ready: Callable[[], bool]) -> HeldBatch | None:
        """Return the held batch to use, or None for a fresh one. Changes nothing.

        Args:
            step: Batches handed out before.
            held: The batches in the buffer, oldest first; at least one, because an epoch begins with a fresh batch.
            is_ready: Tells whether a fresh batch can be taken without waiting.
        """
        raise NotImplementedError(f"{type(self).__name__} needs select(step, held, is_ready)")

    def record(self, record: StepRecord) -> None:
        """Remember what was handed out.

        That is what `select` returned, except for the first batch of an epoch, which is always fresh, and for held
        batches that fill an epoch of fixed length after the data have ended.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return what the selector remembers, as plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict` of another selector of the same plan."""


def least_used(held: Sequence[HeldBatch]) -> HeldBatch:
    """Return the batch with the fewest uses; the oldest if there are several."""
    return min(held, key=lambda one: (one.uses, one.number))


def epoch_length(selector: Selector, num_fresh: int, step: int) -> int:
    """Return the number of batches that an epoch hands out under a predictable plan.

    Args:
        selector: In its state at the beginning of the epoch; this function changes it.
        num_fresh: Batches of the bare loader.
        step: Batches handed out before the epoch.
    """
    held: list[HeldBatch] = []
    loaded = length = 0
    while True:
        is_fresh = not held or selector.select(step + length, held, lambda: False) is None
        if is_fresh:
            if loaded == num_fresh:
                return length
            held = [HeldBatch(number=loaded)]
            loaded += 1
        held[0].uses += 1
        record = StepRecord(
            step=step + length, is_fresh=is_fresh, load_seconds=math.nan, use_seconds=math.nan
        )
        selector.record(record)
        length += 1


LOAD = 1 << 62
"""One load in units of credit. Credit is an integer, so that sums are exact and equal on every machine."""


@dataclass(frozen=True, slots=True)
class Even(Plan):
    """Use every batch `uses` times. With 2.5, two and three uses take turns.

    Step t earns `1 / uses(t)` of a load. A fresh batch is loaded when more has been earned than spent. With constant
    `uses`, n fresh batches make floor(n * uses) steps.
    """

    uses: Schedule = 2.0
    """Uses per fresh batch, at least 1; a number, or a function of the step."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not callable(self.uses):
            _earned(self.uses, 0)

    def selector(self, seed: int) -> Selector:
        """Return a new selector; it draws nothing."""
        return _EvenSelector(self.uses)


class _EvenSelector(Selector):
    def __init__(self, uses: Schedule) -> None:
        self._uses = uses
        self._credit = 0
        """Loads earned less loads spent, in units of `LOAD`; from -LOAD to 0."""

    def select(self, step: int, held: Sequence[HeldBatch], is_ready: Callable[[], bool]) -> HeldBatch | None:
        return None if self._credit + _earned(self._uses, step) > 0 else held[-1]

    def record(self, record: StepRecord) -> None:
        earned = _earned(self._uses, record.step)
        credit = self._credit + earned
        if record.is_fresh:
            # At the beginning of an epoch a load need not be due. The rest of the old batch's uses is then forgotten.
            self._credit = (credit if credit > 0 else earned) - LOAD
        else:
            self._credit = min(credit, 0)

    def state_dict(self) -> dict[str, Any]:
        return {"credit": self._credit}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._credit = int(state["credit"])


def _earned(uses: Schedule, step: int) -> int:
    """Return `1 / uses` of a load. It is rounded down, so that whole numbers of uses come out exactly."""
    value = value_at(uses, step)
    if not 1 <= value < math.inf:
        raise ConfigError(f"Even at step {step}: expected a finite number of uses >= 1, found {value}")
    numerator, denominator = value.as_integer_ratio()
    return LOAD * denominator // numerator


@dataclass(frozen=True, slots=True)
class Bernoulli(Plan):
    """Use a fresh batch with probability `p` at every step, otherwise the last one again.

    Uses of a batch are geometric with mean 1 / p. At equal loads the averaged gradient has (2 - p) times the variance
    that it has under `Even`, and some batches are used very often: with p = 0.2 one in ninety more than 20 times.

    Source: "Sharper Analysis of Data Echoing and New Communication-Efficient Algorithm for Data Parallelism".
    """

    p: Schedule = 0.5
    """Probability of a fresh batch, above 0 and at most 1; a number, or a function of the step."""
    max_uses: int | None = None
    """After so many uses a fresh batch is certain; None for no limit, which is the paper's rule."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not callable(self.p):
            _probability(self.p, 0)
        check_at_least(self, max_uses=1)

    def selector(self, seed: int) -> Selector:
        """Return a new selector; `seed` is that of the coin."""
        return _BernoulliSelector(self, seed)


class _BernoulliSelector(Selector):
    def __init__(self, plan: Bernoulli, seed: int) -> None:
        self._plan = plan
        self._seed = seed

    def select(self, step: int, held: Sequence[HeldBatch], is_ready: Callable[[], bool]) -> HeldBatch | None:
        if self._plan.max_uses is not None and held[-1].uses >= self._plan.max_uses:
            return None
        return None if coin(self._seed, "echo", step, _probability(self._plan.p, step)) else held[-1]


def _probability(p: Schedule, step: int) -> float:
    value = value_at(p, step)
    if not 0 < value <= 1:
        raise ConfigError(f"Bernoulli at step {step}: expected a probability with 0 < p <= 1, found {value}")
    return value


@dataclass(frozen=True, slots=True)
class Ready(Plan):
    """Use a fresh batch if one is ready, otherwise the least used of the last `pool`.

    A fast loader is never echoed, and a slow or irregular one makes nobody wait until `max_uses` is reached. Decisions
    depend on time. `EchoOptions(keeps_decisions=True)` and `Replay` repeat such a run.
    """

    pool: int = 12
    """Number of batches to hold, which is also the cost in memory. One batch would be used unevenly over an irregular
    loader: often in a long pause, once outside. In a very long pause, uses of batches that have left the pool are
    lost: over loaders 2.5 times as slow as a step, eight ranks waited 3 % of the time with 8 and hardly ever with
    12."""
    max_uses: int = 4
    """Uses of a batch at most. When all in the pool have had them, the device waits after all. Up to four passes over
    the same data are about as good as fresh data; many more are not."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, pool=1, max_uses=1)

    @property
    def is_predictable(self) -> bool:
        """No: the speed of the loader decides."""
        return False

    def selector(self, seed: int) -> Selector:
        """Return a new selector; it draws nothing."""
        return _ReadySelector(self.max_uses)


class _ReadySelector(Selector):
    def __init__(self, max_uses: int) -> None:
        self._max_uses = max_uses

    def select(self, step: int, held: Sequence[HeldBatch], is_ready: Callable[[], bool]) -> HeldBatch | None:
        if is_ready():
            return None
        least = least_used(held)
        return least if least.uses < self._max_uses else None


@dataclass(frozen=True, slots=True)
class Replay(Plan):
    """Use the batches in the order of `decisions`: repeats a run of `Ready` or `Auto` without their clocks."""

    decisions: tuple[int, ...]
    """The number of the batch used at each step: `EchoLoader.decisions` of the run to repeat, from its start."""

    def __post_init__(self) -> None:
        check_fields(self)
        newest = -1
        for step, number in enumerate(self.decisions):
            if not 0 <= number <= newest + 1:
                raise ConfigError(
                    f"Replay, step {step}: batch {number} cannot follow batch {newest}, the last fresh one: expected "
                    "the decisions of one rank from its first step on"
                )
            newest = max(newest, number)

    @property
    def pool(self) -> int:
        """As many batches as the decisions reach back."""
        reach, newest = 1, 0
        for number in self.decisions:
            newest = max(newest, number)
            reach = max(reach, newest - number + 1)
        return reach

    @property
    def is_predictable(self) -> bool:
        """No: the decisions may end before the data or after them."""
        return False

    def selector(self, seed: int) -> Selector:
        """Return a new selector; it draws nothing."""
        return _ReplaySelector(self.decisions)


class _ReplaySelector(Selector):
    def __init__(self, decisions: Sequence[int]) -> None:
        self._decisions = decisions

    def select(self, step: int, held: Sequence[HeldBatch], is_ready: Callable[[], bool]) -> HeldBatch | None:
        if step >= len(self._decisions):
            return None  # no error yet: the data may end here too
        number = self._decisions[step]
        return next((one for one in held if one.number == number), None)

    def record(self, record: StepRecord) -> None:
        if record.step >= len(self._decisions):
            raise OutOfTurn(
                f"step {record.step}: Replay has no more than {len(self._decisions)} decisions, and the data go on"
            )
