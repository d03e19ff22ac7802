"""The virtual time of a rank's work, and the runtime of its communication lane.

A lane is a separate task from the rank's program: virtual time passes for both at once, as on a machine that overlaps
communication with computation.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from zlib import crc32

import numpy as np

from stretto.engine.runtime import HostTimer, InlineRuntime, Pending, Runtime, Timer, Work
from stretto.errors import ConfigError
from stretto.fields import check_fields
from stretto_lab.virtual.clock import Schedule, Stopped, Task
from stretto_lab.virtual.trace import LANE, Span, Trace

T = TypeVar("T")

_PICOSECONDS_PER_NANOSECOND = 1000


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """The compute model: the virtual time of a rank's work."""

    micro_batch_ns: int = 1_000_000
    """Time of one micro-batch's forward and backward pass; 1 ms is a round number, not measured."""
    step_ns: int = 0
    """Time of one optimizer step of any size."""
    step_picoseconds_per_element: int = 0
    """Additional time of an optimizer step for every element that the rank owns."""
    backward_share: float = 2 / 3
    """Share of a micro-batch taken by the backward pass, during which gradients come evenly; it is usually twice as
    long as the forward pass. Only hidden reductions need it."""
    preview_factor: float = 1.0
    """Time of a preview, in optimizer steps. A preview steps copies; on CPUs that took 1.5 to 2.8 steps."""
    slowness: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Factor on all work of a rank, by rank; 1 for other ranks."""
    jitter: float = 0.0
    """Each piece of work takes up to this share more or less: a uniform draw from the cluster's seed."""

    def __post_init__(self) -> None:
        check_fields(self)
        if min(self.micro_batch_ns, self.step_ns, self.step_picoseconds_per_element) < 0:
            raise ConfigError(f"costs cannot be negative, found {self}")
        if not all(0 <= factor < math.inf for factor in (self.preview_factor, *self.slowness.values())):
            raise ConfigError(f"factors on costs must be finite and not negative, found {self}")
        if not 0 <= self.backward_share <= 1:
            raise ConfigError(f"backward_share is a share between 0 and 1, found {self.backward_share}")
        if not 0 <= self.jitter < 1:
            raise ConfigError(f"jitter is a share of at least 0 and below 1, found {self.jitter}")


def parse_slowness(text: str) -> dict[int, float]:
    """Read "3=2.5,7=1.2": factors on the work of ranks.

    Raises:
        ConfigError: The text has another form.
    """
    try:
        pairs = [pair.split("=") for pair in text.split(",") if pair.strip()]
        return {int(rank): float(factor) for rank, factor in pairs}
    except ValueError as error:
        raise ConfigError(f"cannot read {text!r}: expected RANK=FACTOR,... as 3=2.5,7=1.2") from error


class RankTime:
    """The virtual time of one rank: the run's clock, and the durations of the rank's work.

    Every kind of work draws its jitter from a separate stream, so durations do not depend on the order in which a
    rank's lane and program run.

    Args:
        rank: The rank.
        schedule: The run's clock.
        trace: Receives each piece of work.
        compute: The compute model.
        seed: Seed of the jitter.
    """

    def __init__(self, rank: int, schedule: Schedule, trace: Trace, compute: Compute, seed: int) -> None:
        self.rank = rank
        self.schedule = schedule
        self._trace = trace
        self._compute = compute
        self._seed = seed
        self._streams: dict[Work, np.random.Generator] = {}
        self._begun: tuple[int, int] | None = None
        """Start and duration of the micro-batch in progress, if its backward pass is simulated in parts."""

    def charge(self, work: Work, elements: int) -> None:
        """Let the time of a piece of work pass, by the compute model.

        Args:
            work: Kind of work.
            elements: Number of elements in a step or preview.
        """
        if work == "micro-batch" and self._begun is not None:
            (start_ns, cost_ns), self._begun = self._begun, None
        else:
            start_ns, cost_ns = self.schedule.now_ns, self._cost_ns(work, elements)
        self._be_busy(work, start_ns, start_ns + cost_ns)

    def pass_backward(self, share: float) -> None:
        """Let a micro-batch continue until `share` of its backward pass is complete; `charge` completes it."""
        if self._begun is None:
            self._begun = self.schedule.now_ns, self._cost_ns("micro-batch", 0)
        start_ns, cost_ns = self._begun
        backward = self._compute.backward_share
        self.schedule.sleep_until(start_ns + round(cost_ns * (1 - backward + backward * share)))

    def charge_ns(self, work: str, duration_ns: int) -> None:
        """Let the current task be busy for `duration_ns`."""
        self._be_busy(work, self.schedule.now_ns, self.schedule.now_ns + duration_ns)

    def _be_busy(self, work: str, start_ns: int, stop_ns: int) -> None:
        self._trace.records.append(Span(self.rank, work, start_ns, stop_ns))
        self.schedule.sleep_until(stop_ns)

    def _cost_ns(self, work: Work, elements: int) -> int:
        compute = self._compute
        if work == "micro-batch":
            cost: float = compute.micro_batch_ns
        else:
            per_element = elements * compute.step_picoseconds_per_element // _PICOSECONDS_PER_NANOSECOND
            cost = compute.step_ns + per_element
            if work == "preview":
                cost *= compute.preview_factor
        if compute.jitter:
            if work not in self._streams:
                self._streams[work] = np.random.default_rng([self._seed, self.rank, crc32(work.encode())])
            cost *= 1 + compute.jitter * self._streams[work].uniform(-1, 1)
        return round(cost * compute.slowness.get(self.rank, 1.0))


class VirtualRuntime(Runtime):
    """Runs a communication lane in virtual time.

    Args:
        time: The rank's clock.
        overlaps: Whether work runs on a separate task; otherwise the program performs it.
    """

    def __init__(self, time: RankTime, *, overlaps: bool) -> None:
        self.virtual_time = self._time = time
        self._inline = None if overlaps else InlineRuntime()
        self._jobs: deque[_Job[Any]] = deque()
        self._lane: Task | None = None
        self._has_closed = False

    def spawn(self, work: Callable[[], T]) -> Pending[T]:
        if self._inline is not None:
            return self._inline.spawn(work)
        job = _Job(work, self._time.schedule)
        self._jobs.append(job)
        if self._lane is None:
            self._lane = self._time.schedule.start(self._time.rank, self._serve, is_lane=True)
        else:
            self._wake_lane()
        return job

    def now(self) -> float:
        return self._time.schedule.now_ns / 1e9

    def timer(self) -> Timer:
        return HostTimer(self.now)

    def keep_pace(self) -> None:
        """Do nothing: a program continues when its work is done."""

    def join(self) -> None:
        self.leave()  # every job's result has been taken: nothing is left to wait for

    def leave(self) -> None:
        self._has_closed = True
        self._jobs.clear()
        self._wake_lane()

    def _wake_lane(self) -> None:
        if self._lane is not None and self._lane.waits_for is self:
            self._time.schedule.wake(self._lane, self._time.schedule.now_ns)

    def __str__(self) -> str:
        """Text for messages: an idle lane waits for work."""
        return "its next round"

    def _serve(self) -> None:
        """Run the lane: one job after the other."""
        while not self._has_closed:
            if self._jobs:
                self._jobs.popleft().run()
            else:
                self._time.schedule.park(self)


class _Job(Pending[T]):
    def __init__(self, work: Callable[[], T], schedule: Schedule) -> None:
        self._work = work
        self._schedule = schedule
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._waiting: Task | None = None

    def run(self) -> None:
        """Perform the work, on the lane."""
        try:
            self._result.append(self._work())
        except Stopped:
            raise
        except BaseException as error:  # it belongs to whoever takes the result
            self._error = error
        if self._waiting is not None and self._waiting.waits_for == LANE:
            self._schedule.wake(self._waiting, self._schedule.now_ns)

    def done(self) -> bool:
        return bool(self._result) or self._error is not None

    def result(self) -> T:
        if not self.done():
            self._waiting = self._schedule.current
            self._schedule.park(LANE)
        if self._error is not None:
            raise self._error
        return self._result[0]
