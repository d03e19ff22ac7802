"""What work costs in virtual time, and the runtime that charges for it.

The compute model: what every rank's work costs in virtual time.

The engine's runtime on a virtual cluster: a lane is a task of its own, with time of its own.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar
from zlib import crc32

import numpy as np

from stretto.engine.runtime import InlineRuntime, Pending, Work
from stretto.errors import ConfigError
from stretto.fields import check_fields
from stretto.virtual.clock import Schedule, Stopped, Task
from stretto.virtual.trace import LANE, Span, Trace

_PICOSECONDS_PER_NANOSECOND = 1000


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """What ranks' work costs; the same on all, but for those that are slower."""

    micro_batch_ns: int = 1_000_000
    """One forward and backward pass of one micro-batch: 1 ms, a unit to think in."""
    step_ns: int = 0
    """One optimizer step, whatever its size."""
    step_picoseconds_per_element: int = 0
    """What an optimizer step costs for every element that the rank owns."""
    preview_factor: float = 1.0
    """What a preview costs, in steps: it steps copies, which takes 1.5 to 2.8 times as long on CPUs."""
    slowness: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Factor on all work of a rank, by rank; those left out have 1."""
    jitter: float = 0.0
    """Each piece of work costs up to this share more or less, drawn evenly from a stream of the cluster's seed."""

    def __post_init__(self) -> None:
        check_fields(self)
        if min(self.micro_batch_ns, self.step_ns, self.step_picoseconds_per_element) < 0:
            raise ConfigError(f"costs cannot be negative, found {self}")
        if not all(0 <= factor < math.inf for factor in (self.preview_factor, *self.slowness.values())):
            raise ConfigError(f"factors on costs must be finite and not negative, found {self}")
        if not 0 <= self.jitter < 1:
            raise ConfigError(f"jitter is a share of at least 0 and below 1, found {self.jitter}")


def parse_slowness(text: str) -> dict[int, float]:
    """Read "3=2.5,7=1.2": factors on the work of ranks.

    Raises:
        ConfigError: Anything else.
    """
    try:
        pairs = [pair.split("=") for pair in text.split(",") if pair.strip()]
        return {int(rank): float(factor) for rank, factor in pairs}
    except ValueError as error:
        raise ConfigError(f"cannot read {text!r}: expected RANK=FACTOR,... as 3=2.5,7=1.2") from error


class Costs:
    """What one rank's work costs, piece by piece.

    Every kind of work draws its jitter from a stream of its own, so that the order in which a rank's lane and
    program come to their turns changes no cost.
    """

    def __init__(self, compute: Compute, seed: int, rank: int) -> None:
        self._compute = compute
        self._slowness = compute.slowness.get(rank, 1.0)
        self._seed = (seed, rank)
        self._streams: dict[Work, np.random.Generator] = {}

    def of(self, work: Work, elements: int) -> int:
        """Return what the next piece of `work` costs, in nanoseconds.

        Args:
            work: Its kind.
            elements: How many of them a step or a preview goes over.
        """
        compute = self._compute
        if work == "micro-batch":
            cost: float = compute.micro_batch_ns
        else:
            per_element = elements * compute.step_picoseconds_per_element // _PICOSECONDS_PER_NANOSECOND
            cost = compute.step_ns + per_element
            if work == "preview":
                cost *= compute.preview_factor
        if compute.jitter:
            cost *= 1 + compute.jitter * self._stream(work).uniform(-1, 1)
        return round(cost * self._slowness)

    def _stream(self, work: Work) -> np.random.Generator:
        if work not in self._streams:
            self._streams[work] = np.random.default_rng([*self._seed, crc32(work.encode())])
        return self._streams[work]


T = TypeVar("T")


class Desk:
    """Where one rank's program and lane work: they share the rank's costs and the run's clock."""

    def __init__(self, rank: int, schedule: Schedule, costs: Costs, trace: Trace) -> None:
        self.rank = rank
        self.schedule = schedule
        self._costs = costs
        self._trace = trace

    def charge(self, work: Work, elements: int) -> None:
        """Let a piece of work take the time that the compute model says."""
        self.charge_ns(work, self._costs.of(work, elements))

    def charge_ns(self, work: str, duration_ns: int) -> None:
        """Let the current task be busy for `duration_ns`."""
        now_ns = self.schedule.now_ns
        self._trace.records.append(Span(self.rank, work, now_ns, now_ns + duration_ns))
        self.schedule.sleep(duration_ns)


class VirtualRuntime:
    """See `stretto.engine.runtime.Runtime`.

    Args:
        desk: The rank's.
        overlaps: Whether work runs on a task beside the program; otherwise the program performs it.
    """

    def __init__(self, desk: Desk, *, overlaps: bool) -> None:
        self._desk = desk
        self._inline = None if overlaps else InlineRuntime()
        self._jobs: deque[_Job[object]] = deque()
        self._lane: Task | None = None
        self._has_closed = False

    def spawn(self, work: Callable[[], T]) -> Pending[T]:
        """See `Runtime.spawn`."""
        if self._inline is not None:
            return self._inline.spawn(work)
        job = _Job(work, self._desk.schedule)
        self._jobs.append(job)  # type: ignore[arg-type]  # the queue does not care what a job returns
        if self._lane is None:
            self._lane = self._desk.schedule.start(self._desk.rank, self._serve, is_lane=True)
        else:
            self._rouse()
        return job

    def now(self) -> float:
        """Return virtual seconds since the run began."""
        return self._desk.schedule.now_ns / 1e9

    def charge(self, work: Work, elements: int = 0) -> None:
        """See `Runtime.charge`."""
        self._desk.charge(work, elements)

    def join(self) -> None:
        """See `Runtime.join`; every job's result has been taken, so that nothing is left to wait for."""
        self.leave()

    def leave(self) -> None:
        """See `Runtime.leave`."""
        self._has_closed = True
        self._jobs.clear()
        self._rouse()

    def _rouse(self) -> None:
        if self._lane is not None and self._lane.waits_for is self:
            self._desk.schedule.wake(self._lane, self._desk.schedule.now_ns)

    def __str__(self) -> str:
        return "its next round"

    def _serve(self) -> None:
        """The lane: one job after the other."""
        while not self._has_closed:
            if self._jobs:
                self._jobs.popleft().run()
            else:
                self._desk.schedule.park(self)


class _Job(Generic[T]):
    """Work of a lane, and who waits for it."""

    def __init__(self, work: Callable[[], T], schedule: Schedule) -> None:
        self._work = work
        self._schedule = schedule
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._waiting: Task | None = None

    def run(self) -> None:
        """Perform it, on the lane."""
        try:
            self._result.append(self._work())
        except Stopped:
            raise
        except BaseException as error:  # it belongs to whoever takes the result
            self._error = error
        if self._waiting is not None and self._waiting.waits_for == LANE:
            self._schedule.wake(self._waiting, self._schedule.now_ns)

    def done(self) -> bool:
        """See `Pending.done`."""
        return bool(self._result) or self._error is not None

    def result(self) -> T:
        """See `Pending.result`."""
        if not self.done():
            self._waiting = self._schedule.current
            self._schedule.park(LANE)
        if self._error is not None:
            raise self._error
        return self._result[0]
