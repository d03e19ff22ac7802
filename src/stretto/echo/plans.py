"""Plans: which updates use fresh batches, and which use held ones again.

A `Plan` holds the options. Its `Selector` decides, and remembers what it needs for that. Updates are counted from 0 on
this rank, over all epochs.

    Even         every update's batches the same number of times
    Bernoulli    fresh batches with a given probability
    Ready        batch by batch: a fresh one if one is ready, a held one if not
    Auto         as many uses as cost nothing, measured in the run (see `measured.py`)

Note [The unit of an echo]
    All micro-batches of an update are taken at the same parameters, or at two of them (`acco`). A second use of a
    batch within the update would bring the same gradient again. So a plan decides once for all batches of an update:
    they are fresh, or they are the batches of the update before, in their order. `Ready` decides for each batch, and
    never takes one that this update has used.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from stretto.echo.buffer import HeldBatch
from stretto.errors import ConfigError
from stretto.fields import check_at_least, check_fields, did_you_mean
from stretto.randomness import coin
from stretto.schedules import Schedule, value_at


class Plan(ABC):
    """How often batches are used; a subclass is a frozen dataclass of options."""

    __slots__ = ()

    @property
    def pool(self) -> int:
        """Number of the latest fresh batches that are held for more uses, if updates have one micro-batch.

        One more is held for every further micro-batch of an update.
        """
        return 1

    @property
    def echoes(self) -> bool:
        """Whether any batch is used again, except to fill an epoch of fixed length."""
        return True

    @property
    def decides_by_update(self) -> bool:
        """Whether one decision holds for all batches of an update; otherwise every batch has its own."""
        return True

    @property
    def is_predictable(self) -> bool:
        """Whether decisions depend only on seed and update, so that the length of an epoch is known before it
        begins.
        """
        return True

    @abstractmethod
    def selector(self, seed: int) -> "Selector":
        """Return a new selector; `seed` decides its random draws."""


def check_plan(plan: object) -> None:
    """Raise ConfigError unless `plan` is a plan; the message names the closest one."""
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
    """A record of one returned batch."""

    update: int
    """Number of updates begun before the one that uses the batch."""
    slot: int
    """Number of batches that this update used before."""
    is_fresh: bool
    """Whether it was the batch's first use."""
    load_seconds: float
    """Time that the bare loader took for the batch; nan if it was held."""
    use_seconds: float
    """Time that the caller spent on the previous batch, until it requested this one; NaN for the first batch."""


class Selector:
    """Decides for a plan. A subclass implements `select`, and the other methods if it has state."""

    is_measuring: bool = False
    """Whether `StepRecord.use_seconds` is needed now; then the loader waits for a device that lags behind the host."""

    def select(
        self, update: int, held: Sequence[HeldBatch], is_ready: Callable[[], bool]
    ) -> HeldBatch | None:
        """Return a held batch to use, or None for a fresh one. Changes nothing.

        For a plan that decides by update it is called at the first batch of an update. If it returns a held batch, the
        update repeats the batches of the previous update.

        Args:
            update: Updates begun before this one.
            held: The batches that may be used now, at least one: not used in this update, nor at these parameters. The
                oldest is first. Under a plan that decides by update they are the batches of the previous update.
            is_ready: Returns whether a fresh batch is available without waiting.
        """
        raise NotImplementedError(f"{type(self).__name__} needs select(update, held, is_ready)")

    def record(self, record: StepRecord) -> None:
        """Count a returned batch.

        It is the batch from `select`, unless no held batch could be used, or held batches fill an epoch of fixed length
        after the data have ended.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the selector's state as plain values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict` of another selector of the same plan."""


def least_used(held: Sequence[HeldBatch]) -> HeldBatch:
    """Return the batch with the fewest uses; the oldest of several."""
    return min(held, key=lambda one: (one.uses, one.number))


def epoch_length(selector: Selector, num_fresh: int, update: int, micro_batches: int = 1) -> int:
    """Return the number of batches in an epoch under a predictable plan.

    Args:
        selector: Its state is that at the beginning of the epoch; this function changes it.
        num_fresh: Batches of the bare loader.
        update: Updates begun before the epoch.
        micro_batches: Number per update.
    """
    held: list[HeldBatch] = []
    loaded = length = 0
    while True:
        is_fresh = not held or selector.select(update, held, lambda: False) is None
        size = min(micro_batches, num_fresh - loaded) if is_fresh else micro_batches
        if size == 0:
            return length
        if is_fresh:
            held = [HeldBatch(number=loaded)]
            loaded += size
        held[0].uses += 1
        length += size
        if size < micro_batches:  # the data end within this update
            return length
        record = StepRecord(
            update=update, slot=0, is_fresh=is_fresh, load_seconds=math.nan, use_seconds=math.nan
        )
        selector.record(record)
        update += 1


LOAD = 1 << 62
"""One load in units of credit. Credit is an integer, so that sums are exact and equal on every machine."""


@dataclass(frozen=True, slots=True)
class Even(Plan):
    """Use the batches of every update in `uses` updates. With 2.5, two and three uses alternate.

    A load is fresh batches for one update, and update t earns `1 / uses(t)` of a load. Fresh batches are loaded when
    more loads have been earned than spent. With constant `uses`, n loads give floor(n * uses) updates. Uses that could
    change nothing are replaced by fresh batches, which gives fewer updates.
    """

    uses: Schedule = 2.0
    """Uses per fresh batch, at least 1; a number, or a function of the update."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not callable(self.uses):
            _earned(self.uses, 0)

    @property
    def echoes(self) -> bool:
        return self.uses != 1

    def selector(self, seed: int) -> Selector:
        """Return a new selector; it draws nothing."""
        return _EvenSelector(self.uses)


class _EvenSelector(Selector):
    def __init__(self, uses: Schedule) -> None:
        self._uses = uses
        self._credit = 0
        """Loads earned minus loads spent, in units of `LOAD`; from -LOAD to 0."""

    def select(
        self, update: int, held: Sequence[HeldBatch], is_ready: Callable[[], bool]
    ) -> HeldBatch | None:
        return None if self._credit + _earned(self._uses, update) > 0 else held[-1]

    def record(self, record: StepRecord) -> None:
        if record.slot > 0:
            return
        earned = _earned(self._uses, record.update)
        credit = self._credit + earned
        if record.is_fresh:
            # Where an epoch begins, or a use could change nothing, a load need not be due. The rest of the old batches'
            # uses is then forgotten.
            self._credit = (credit if credit > 0 else earned) - LOAD
        else:
            self._credit = min(credit, 0)

    def state_dict(self) -> dict[str, Any]:
        return {"credit": self._credit}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._credit = int(state["credit"])


def _earned(uses: Schedule, update: int) -> int:
    """Return `1 / uses` of a load. It is rounded down, so that whole numbers of uses come out exactly."""
    value = value_at(uses, update)
    if not 1 <= value < math.inf:
        raise ConfigError(f"Even at update {update}: expected a finite number of uses >= 1, found {value}")
    numerator, denominator = value.as_integer_ratio()
    return LOAD * denominator // numerator


@dataclass(frozen=True, slots=True)
class Bernoulli(Plan):
    """Use fresh batches with probability `p` in every update, otherwise repeat the batches of the previous update.

    Uses of a batch are geometric with mean 1 / p. At equal loads the averaged gradient has (2 - p) times the variance
    that it has under `Even`, and some batches are used very often: with p = 0.2 one in ninety more than 20 times.

    Source: "Sharper Analysis of Data Echoing and New Communication-Efficient Algorithm for Data Parallelism", as its
    reviews describe it.
    """

    p: Schedule = 0.5
    """Probability of fresh batches, above 0 and at most 1; a number, or a function of the update."""
    max_uses: int | None = None
    """Number of uses after which fresh batches are certain; None for no limit."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not callable(self.p):
            _probability(self.p, 0)
        check_at_least(self, max_uses=1)

    def selector(self, seed: int) -> Selector:
        """Return a new selector; `seed` decides the coin."""
        return _BernoulliSelector(self, seed)


class _BernoulliSelector(Selector):
    def __init__(self, plan: Bernoulli, seed: int) -> None:
        self._plan = plan
        self._seed = seed

    def select(
        self, update: int, held: Sequence[HeldBatch], is_ready: Callable[[], bool]
    ) -> HeldBatch | None:
        if self._plan.max_uses is not None and held[-1].uses >= self._plan.max_uses:
            return None
        return None if coin(self._seed, "echo", update, _probability(self._plan.p, update)) else held[-1]


def _probability(p: Schedule, update: int) -> float:
    value = value_at(p, update)
    if not 0 < value <= 1:
        raise ConfigError(
            f"Bernoulli at update {update}: expected a probability with 0 < p <= 1, found {value}"
        )
    return value


@dataclass(frozen=True, slots=True)
class Ready(Plan):
    """Use a fresh batch if one is ready, otherwise the least used held batch that this update has not used.

    A fast loader is never echoed, and training does not wait for a slow or irregular loader until `max_uses` is
    reached, or until an update has used all held batches. Decisions depend on time. The batches of an update may be
    fresh in part.
    """

    pool: int = 12
    """Number of batches to hold, plus one for every further micro-batch of an update; they cost memory. A single
    batch would be used unevenly over an irregular loader: often in a long pause, once outside. In a very long pause,
    uses of batches that have left the pool are lost: with loaders 2.5 times as slow as a step, eight ranks waited 3
    % of the time with 8 and hardly ever with 12."""
    max_uses: int = 4
    """Most uses of a batch. When all batches in the pool have had them, the device waits. Up to four passes over the
    same data are about as good as fresh data; many more are not."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, pool=1, max_uses=1)

    @property
    def decides_by_update(self) -> bool:
        """False: the loader's speed varies from batch to batch."""
        return False

    @property
    def is_predictable(self) -> bool:
        """False: decisions depend on the loader's speed."""
        return False

    def selector(self, seed: int) -> Selector:
        """Return a new selector; it draws nothing."""
        return _ReadySelector(self.max_uses)


class _ReadySelector(Selector):
    def __init__(self, max_uses: int) -> None:
        self._max_uses = max_uses

    def select(
        self, update: int, held: Sequence[HeldBatch], is_ready: Callable[[], bool]
    ) -> HeldBatch | None:
        if is_ready():
            return None
        least = least_used(held)
        return least if least.uses < self._max_uses else None
