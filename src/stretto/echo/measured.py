"""The number of uses of a batch that cost no time: measured once within a run (`Auto`), or before it (`diagnose`).

    L       the loader alone, seconds per fresh batch
    C + A   the step on one batch: computing, and communication that it waits for
    e*      L / (C + A), the uses per fresh batch that are free

All three are means over whole updates, so that e* is also the time in which the batches of an update are loaded, over
that of the update. With e* uses, the loader and the step are equally fast. An echo multiplies the updates per second by
at most e*, and the progress by less, because another use of a batch is worth less than a fresh batch. More uses than e*
throw away fresh batches that the loader could deliver. Where e* is 1 or less there is nothing to gain.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from stretto.echo.buffer import HeldBatch
from stretto.echo.loader import EchoLoader, check_iterable
from stretto.echo.plans import Even, Plan, Ready, Selector, StepRecord
from stretto.errors import ConfigError
from stretto.fields import check_callable, check_fields, is_count, shown
from stretto.machine import usable_cores
from stretto.records import Update


@dataclass(frozen=True, slots=True)
class Auto(Plan):
    """Measure over `window` fresh batches without echo, then use every batch as often as costs no time.

    `Auto` keeps the number that it found and saves it with the state. A resumed run therefore does not depend on the
    speed of the machine on which it resumes.
    """

    max_uses: float = 4.0
    """Most uses of a batch, however slow the loader is."""
    window: int = 32
    """Number of fresh batches to measure, rounded up to whole updates; at least twice the number that the loader's
    workers keep ready, because otherwise the measurement counts ready batches instead of the loader's speed."""
    skip: int = 4
    """Number of batches at the start of the window that are not counted, while workers start and memory is new."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.max_uses < math.inf:
            raise ConfigError(f"Auto(max_uses={self.max_uses}): expected a finite number of at least 1")
        if not 0 <= self.skip < self.window:
            raise ConfigError(f"Auto(window={self.window}, skip={self.skip}): expected 0 <= skip < window")

    @property
    def is_predictable(self) -> bool:
        """False: decisions depend on measured times."""
        return False

    def selector(self, seed: int) -> Selector:
        """Return a new selector; it draws nothing."""
        return _AutoSelector(self)


class _AutoSelector(Selector):
    """Measures under `Even(1)`, then decides as `Even` with the measured number."""

    def __init__(self, plan: Auto) -> None:
        self._plan = plan
        self._begin(None)

    def _begin(self, uses: float | None) -> None:
        self._uses = uses
        """Uses per fresh batch; None until they are known."""
        self.is_measuring = uses is None
        self._even = Even(1.0 if uses is None else uses).selector(seed=0)
        self._load_seconds: list[float] = []
        self._use_seconds: list[list[float]] = []
        """By update: the seconds of every batch."""

    def select(
        self, update: int, held: Sequence[HeldBatch], is_ready: Callable[[], bool]
    ) -> HeldBatch | None:
        return self._even.select(update, held, is_ready)

    def record(self, record: StepRecord) -> None:
        if self.is_measuring:
            self._measure(record)
        self._even.record(record)

    def _measure(self, record: StepRecord) -> None:
        """Add up times until an update begins after the window. A use ends when the next batch is requested."""
        if self._use_seconds:
            self._use_seconds[-1].append(record.use_seconds)
        if record.slot == 0:
            if len(self._load_seconds) >= self._plan.window:
                self._begin(self._found())
                return
            self._use_seconds.append([])
        self._load_seconds.append(record.load_seconds)

    def _found(self) -> float:
        """Return e*, from updates that began after the first `skip` batches."""
        counts = itertools.accumulate((len(uses) for uses in self._use_seconds), initial=0)
        uses = [
            statistics.mean(seconds)
            for count, seconds in zip(counts, self._use_seconds, strict=False)
            if count >= self._plan.skip
        ]
        return free_uses(self._load_seconds[self._plan.skip :], uses, self._plan.max_uses)

    def state_dict(self) -> dict[str, Any]:
        return {"uses": self._uses, **self._even.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._begin(state["uses"])  # a measurement that was not finished begins again
        self._even.load_state_dict(state)


def free_uses(load_seconds: Sequence[float], use_seconds: Sequence[float], max_uses: float) -> float:
    """Return e*, at least 1 and at most `max_uses`, rounded down to hundredths; NaN is ignored.

    Loads count by their mean, because a loader may deliver in bursts. Uses count by their median, because evaluations
    and checkpoints take time between batches too; those of an update count as one, by their mean, because the last one
    waits for communication.
    """
    loads = [seconds for seconds in load_seconds if not math.isnan(seconds)]
    uses = [seconds for seconds in use_seconds if not math.isnan(seconds)]
    if not loads or not uses:
        return 1.0
    ratio = statistics.mean(loads) / max(statistics.median(uses), 1e-9)
    return max(1.0, _hundredths(min(ratio, max_uses)))


def _hundredths(uses: float) -> float:
    return math.floor(100 * uses) / 100


WORTHWHILE = 1.1
"""Smallest e* at which an echo is recommended. Below it, errors of the measurement alone could explain the number."""
USES_MAX = 4.0
"""Most recommended uses per fresh batch, however slow the loader is."""
IRREGULAR = 0.3
"""Coefficient of variation of load times above which `Ready` is recommended, since `Even` would wait for late
batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The times that `diagnose` has measured, and the conclusions."""

    load_seconds: float
    """L: mean time of the loader alone, per fresh batch."""
    load_variation: float
    """Standard deviation of that time, as a share of the mean."""
    step_seconds: float
    """C + A: mean time of a step on one batch that is used repeatedly."""
    exposed_seconds: float
    """A: the part of this time, per batch, for which the step waited for communication, as far as its updates report
    it."""
    period_seconds: float
    """Mean time of a step with its fresh batch, in the user's loop."""
    step_variation: float = 0.0
    """Standard deviation of `step_seconds` between updates, as a share of it."""
    period_variation: float = 0.0
    """Standard deviation of `period_seconds` between updates, as a share of it."""
    advice: tuple[str, ...] = ()
    """Remedies to try before an echo if the loop waits for data, the cheapest first."""

    @property
    def free_uses(self) -> float:
        """e*: the uses per fresh batch that cost no time."""
        return self.load_seconds / self.step_seconds

    @property
    def is_input_bound(self) -> bool:
        """Whether the loader is slower than the step, even if both run at the same time."""
        return self.free_uses >= WORTHWHILE

    @property
    def waits(self) -> bool:
        """Whether the loop takes clearly longer than the step alone."""
        return self.period_seconds >= WORTHWHILE * self.step_seconds

    @property
    def is_disturbed(self) -> bool:
        """Whether the loop took clearly less time than one of its parts, because other work slowed that part."""
        return self.period_seconds * WORTHWHILE < max(self.step_seconds, self.load_seconds)

    @property
    def plan(self) -> Plan | None:
        """The recommended plan; None if an echo cannot help."""
        if not self.is_input_bound:
            return None
        if self.load_variation >= IRREGULAR:
            # Ready echoes only while no batch is ready, so its mean number of uses comes out right by itself. A bound
            # closer to e* would make it wait in every long pause.
            return Ready(max_uses=math.ceil(USES_MAX))
        return Even(_hundredths(min(self.free_uses, USES_MAX)))

    @property
    def summary(self) -> str:
        """The bottleneck, the remedy and the largest possible gain, in a few sentences."""
        text = self._verdict
        if self.is_disturbed:
            text += (
                " But the loop took less time than its parts alone, so other work disturbed the measurement. "
                "Repeat it on a quiet machine."
            )
        return text

    @property
    def _verdict(self) -> str:
        facts = f"a batch takes {_ms(self.load_seconds)} to load and {_ms(self.step_seconds)} to train on."
        first = f"First {self.advice[0]}" if self.advice else "No cheaper remedy remains"
        if self.is_input_bound:
            most = min(self.free_uses, USES_MAX)
            return (
                f"Loading is the bottleneck: {facts} {first}. Then use batches again with {self.plan}: while "
                f"the loader reads the next batch, a batch can be used {self.free_uses:.2f} times. Training "
                f"reaches a loss at most {most:.1f} times sooner; in practice less, because a batch teaches "
                "less when it is used again."
            )
        if self.waits:
            gain = self.period_seconds / max(self.step_seconds, self.load_seconds)
            return (
                f"Loading and training alternate: {facts} {first}: a loss is then reached at most {gain:.1f} "
                "times sooner. To use batches again cannot help."
            )
        return f"Loading is not the bottleneck: {facts} To use batches again cannot help."


def diagnose(
    loader: Iterable[Any],
    step: Callable[[Any], Update | None],
    *,
    batches: int = 32,
    skip: int = 4,
    now: Callable[[], float] = time.perf_counter,
    told: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> Diagnosis:
    """Measure a loader and a step, first separately and then together. All ranks of a job must call it alike.

    The steps are real and train the model.

    Args:
        loader: The training loader. It must restart after its end. For an `EchoLoader` the bare loader is measured.
        step: Trains on one batch and returns the update if there was one, as `parallel.micro_batch` does.
        batches: Number of batches in each of the three measurements. Use whole updates, because the last batch of an
            update waits for communication; and at least twice the number that the loader's workers keep ready, because
            otherwise these are measured.
        skip: Number of batches at the start of each measurement that are not counted.
        now: Returns the time in seconds, on the clock to measure by.
        told: Called before each batch with the name of the measurement, its batches so far, and their total.

    Raises:
        ConfigError: The loader has no batch, or a number is out of its range.
    """
    if not is_count(batches, 1) or not is_count(skip, 0):
        raise ConfigError(
            f"diagnose(batches={batches!r}, skip={skip!r}): expected batches >= 1 and skip >= 0"
        )
    check_iterable(loader, "diagnose")
    for name, function in (("step", step), ("now", now), ("told", told)):
        check_callable(function, f"diagnose({name}=...)", "a function")
    bare = loader.loader if isinstance(loader, EchoLoader) else loader
    source = _endless(bare)
    first = next(source)
    whole = skip + batches
    loads = [_load_seconds(source, now) for _ in _telling(told, "the loader alone", whole)][skip:]
    steps = _time_steps(step, lambda: first, skip, now, _telling(told, "steps on one batch", whole))
    periods = _time_steps(step, lambda: next(source), skip, now, _telling(told, "the loop", whole))
    source.close()
    found = Diagnosis(
        load_seconds=statistics.mean(loads),
        load_variation=_variation(loads),
        step_seconds=steps.seconds,
        step_variation=steps.variation,
        exposed_seconds=steps.exposed_seconds,
        period_seconds=periods.seconds,
        period_variation=periods.variation,
        advice=tuple(_advice(bare)),
    )
    return found if found.is_input_bound or found.waits else replace(found, advice=())


def _telling(told: Callable[[str, int, int], None], what: str, total: int) -> Iterator[int]:
    """Yield the batch numbers of a measurement, and report each number first."""
    for number in range(total):
        told(what, number, total)
        yield number


def _endless(loader: Iterable[Any]) -> Generator[Any, None, None]:
    """Yield the loader's batches, epoch after epoch."""
    while True:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
        if is_empty:
            raise ConfigError(
                "diagnose: the loader has no batch, or has no more: expected a loader that begins again, not a "
                "generator"
            )


def _load_seconds(source: Iterator[Any], now: Callable[[], float]) -> float:
    """Return how long the next batch takes."""
    started = now()
    next(source)
    return now() - started


@dataclass(frozen=True, slots=True)
class _Steps:
    """The measured times of steps."""

    seconds: float
    """Mean seconds of a step."""
    exposed_seconds: float
    """Seconds of these spent waiting for communication."""
    variation: float
    """Standard deviation between updates, as a share of the mean."""


def _time_steps(
    step: Callable[[Any], Update | None],
    batch: Callable[[], Any],
    skip: int,
    now: Callable[[], float],
    numbers: Iterator[int],
) -> _Steps:
    """Return the times of steps after `skip` others; `numbers` counts all of them."""
    for _ in itertools.islice(numbers, skip):
        step(batch())
    exposed = 0.0
    _synchronize()
    started = now()
    ends, of_updates = [], []
    for _ in numbers:
        update = step(batch())
        ends.append(now())
        if not isinstance(update, Update | None):
            raise ConfigError(
                f"diagnose: expected a step that returns an Update or None, found {shown(update)}"
            )
        if update is not None:
            of_updates.append(ends[-1])
            exposed += update.exposed_seconds if math.isfinite(update.exposed_seconds) else 0.0
    _synchronize()
    seconds, count = now() - started, len(ends)
    between = [end - begin for begin, end in itertools.pairwise([started, *(of_updates or ends)])]
    return _Steps(seconds / count, exposed / count, _variation(between))


def _variation(seconds: Sequence[float]) -> float:
    """Return the standard deviation as a share of the mean."""
    mean = statistics.mean(seconds)
    return statistics.pstdev(seconds) / mean if mean else 0.0


def _synchronize() -> None:
    """Wait for a device that lags behind the host."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _advice(loader: Any) -> Iterator[str]:
    cores = len(usable_cores())
    workers = getattr(loader, "num_workers", None)
    if workers is None:
        yield "read ahead in the background (EchoLoader(loader, Even(1)) does), with more workers if it decodes"
    elif workers == 0:
        yield f"load while training runs: num_workers=1 or more, of {cores} cores"
    elif workers < cores:
        yield f"raise num_workers from {workers} towards the {cores} cores"
    if workers and not getattr(loader, "persistent_workers", True):
        yield "keep workers from epoch to epoch: persistent_workers=True"
    if torch.cuda.is_available() and not getattr(loader, "pin_memory", True):
        yield "copy to the device faster: pin_memory=True"
    yield "decode less, cache, or store the data nearer"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
