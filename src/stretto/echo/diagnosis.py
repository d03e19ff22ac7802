"""Whether a job waits for its data, and what an echo could gain: measured apart, then together.

    L       the loader alone, seconds per fresh batch
    C + A   the step on one cached batch: computing, and communication that it waits for
    e*      L / (C + A), the uses per fresh batch that are free

An echo multiplies the steps per second by at most e*, and the progress by less, since another use of a batch is worth
less than a fresh one. Where e* is about 1 or below there is nothing to gain.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from stretto.echo.loader import EchoLoader
from stretto.echo.plans import Even, Plan, Ready
from stretto.errors import ConfigError
from stretto.records import Update

WORTHWHILE = 1.1
"""Smallest e* at which an echo is recommended: below, the measurement's own error could be all there is."""
USES_MAX = 4.0
"""Uses per fresh batch that are recommended at most, however slow the loader is."""
IRREGULAR = 0.3
"""Coefficient of variation of the loads from which on `Ready` is recommended: a planned echo would wait for the late
ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What was measured, and what follows."""

    load_seconds: float
    """L: mean time of the loader alone, per fresh batch."""
    load_variation: float
    """Its standard deviation as a share of the mean."""
    step_seconds: float
    """C + A: mean time of a step on a cached batch."""
    exposed_seconds: float
    """A: the part of it that waited for communication, as far as the step told; per batch."""
    period_seconds: float
    """Mean time of a step with its fresh batch, in the loop as it is."""
    advice: tuple[str, ...]
    """What to try before an echo, the cheapest first."""

    @property
    def free_uses(self) -> float:
        """e*: uses per fresh batch that cost no fresh batch."""
        return self.load_seconds / self.step_seconds

    @property
    def is_input_bound(self) -> bool:
        """Whether the loader is slower than the step even where both overlap."""
        return self.free_uses >= WORTHWHILE

    @property
    def waits(self) -> bool:
        """Whether the loop, as it is, takes noticeably longer than the step alone."""
        return self.period_seconds >= WORTHWHILE * self.step_seconds

    @property
    def plan(self) -> Plan | None:
        """The plan to use; None where an echo cannot help."""
        if not self.is_input_bound:
            return None
        if self.load_variation >= IRREGULAR:
            # It echoes only while nothing is ready, so the mean comes out right; a bound nearer to it would be waited
            # for in every long pause.
            return Ready(max_uses=math.ceil(USES_MAX))
        return Even(math.floor(100 * min(self.free_uses, USES_MAX)) / 100)

    @property
    def incident(self) -> str:
        """One line: the bottleneck, what to do, and the most it could gain."""
        facts = f"a batch takes {_ms(self.load_seconds)} to load and {_ms(self.step_seconds)} to train on"
        first = f"first {self.advice[0]}" if self.advice else "cheaper remedies are in use"
        if self.is_input_bound:
            return (
                f"input-bound: {facts}; {first}; then echo with {self.plan}: {self.free_uses:.2f} uses are free, and "
                f"steps per second grow at most {min(self.free_uses, USES_MAX):.1f} times, progress by less"
            )
        if self.waits:
            gain = self.period_seconds / max(self.step_seconds, self.load_seconds)
            return (
                f"not input-bound, but loading and training take turns: {facts}; {first}: at most {gain:.1f} times "
                "the steps per second; an echo cannot help"
            )
        return f"not input-bound: {facts}; an echo cannot help"


def diagnose(
    loader: Iterable[Any], step: Callable[[Any], Update | None], *, batches: int = 32, skip: int = 4
) -> Diagnosis:
    """Measure a loader and a step, apart and together; all ranks of a job must call alike.

    The steps are real ones: they train the model.

    Args:
        loader: The bare training loader, which must begin anew when it has ended; of an `EchoLoader` the bare one
            is taken.
        step: Trains on one batch and returns the update if there was one, as `parallel.micro_batch` does.
        batches: Measured each time; at least twice what the loader's workers keep ready, or their stock is
            measured.
        skip: Left out at the beginning of each measurement.

    Raises:
        ConfigError: The loader has no batch.
    """
    if batches < 1 or skip < 0:
        raise ConfigError(f"expected batches >= 1 and skip >= 0, found {batches} and {skip}")
    bare = loader.loader if isinstance(loader, EchoLoader) else loader
    source = _endless(bare)
    cached = next(source)
    loads = [_seconds(lambda: next(source)) for _ in range(skip + batches)][skip:]
    steps, exposed = _steps(step, lambda: cached, batches, skip)
    periods, _ = _steps(step, lambda: next(source), batches, skip)
    load_seconds, step_seconds = statistics.mean(loads), steps / batches
    diagnosis = Diagnosis(
        load_seconds=load_seconds,
        load_variation=statistics.pstdev(loads) / load_seconds if load_seconds else 0.0,
        step_seconds=step_seconds,
        exposed_seconds=exposed / batches,
        period_seconds=periods / batches,
        advice=tuple(_advice(bare)),
    )
    source.close()
    return diagnosis


def _endless(loader: Iterable[Any]) -> Generator[Any, None, None]:
    while True:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
        if is_empty:
            raise ConfigError(
                "the loader has no batch, or none any more: expected one that begins anew, not a generator"
            )


def _steps(
    step: Callable[[Any], Update | None], batch: Callable[[], Any], count: int, skip: int
) -> tuple[float, float]:
    """Return the seconds that `count` steps took, after `skip` others, and those in which they waited."""
    for _ in range(skip):
        step(batch())
    exposed = 0.0
    _settle()
    started = time.perf_counter()
    for _ in range(count):
        update = step(batch())
        if update is not None and math.isfinite(update.exposed_seconds):
            exposed += update.exposed_seconds
    _settle()
    return time.perf_counter() - started, exposed


def _seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _settle() -> None:
    """Wait for a device that runs behind the host."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _advice(loader: Any) -> Iterator[str]:
    cores = os.cpu_count() or 1
    workers = getattr(loader, "num_workers", None)
    if workers is None:
        yield "read ahead in the background (EchoLoader(loader, Even(1)) does), with more workers if it decodes"
    elif workers == 0:
        yield f"load beside the training: num_workers=1 or more, of {cores} cores"
    elif workers < cores:
        yield f"raise num_workers from {workers} towards the {cores} cores"
    if workers and not getattr(loader, "persistent_workers", True):
        yield "keep workers from epoch to epoch: persistent_workers=True"
    if torch.cuda.is_available() and not getattr(loader, "pin_memory", True):
        yield "copy to the device faster: pin_memory=True"
    yield "decode less, cache, or store the data nearer"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
