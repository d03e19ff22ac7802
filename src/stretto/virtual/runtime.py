"""The engine's runtime on a virtual cluster: a lane is a task of its own, with time of its own."""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from stretto.engine.runtime import InlineRuntime, Pending, Work
from stretto.virtual.compute import Costs
from stretto.virtual.schedule import Schedule, Stopped, Task
from stretto.virtual.standing import LANE
from stretto.virtual.trace import Span, Trace

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
