"""Where the communication lane runs: in the caller, or on a thread beside it.

A runtime is the seam between the engine and the machine. The lane's code is the same on all of them.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Literal, Protocol, TypeVar, runtime_checkable

import torch

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Work = Literal["micro-batch", "step", "preview"]
"""Kinds of work that take time on a device."""


class Pending(Protocol[T_co]):
    """Work under way; `result` must be taken exactly once."""

    def done(self) -> bool:
        """Return whether `result` would not wait."""
        ...

    def result(self) -> T_co:
        """Wait, then return what the work returned or raise what it raised."""
        ...


class Runtime(Protocol):
    """Runs one lane's work, one piece after the other."""

    def spawn(self, work: Callable[[], T]) -> Pending[T]:
        """Start `work` after everything spawned before."""
        ...

    def now(self) -> float:
        """Return seconds on this runtime's clock."""
        ...

    def charge(self, work: Work, elements: int = 0) -> None:
        """Take note that this rank has done `work`, over so many `elements`; costs time where time is virtual."""
        ...

    def join(self) -> None:
        """Wait for everything spawned and end."""
        ...

    def leave(self) -> None:
        """End without waiting, after an error; what runs already ends by itself, what waits is dropped."""
        ...


@runtime_checkable
class BringsRuntime(Protocol):
    """A process group with a time of its own, such as a virtual cluster's: its lanes run on what it brings."""

    def lane_runtime(self, *, overlaps: bool) -> Runtime:
        """Return a runtime for one job's lane.

        Args:
            overlaps: Whether the lane runs beside the caller; otherwise work is performed when its result is taken.
        """
        ...


def choose_runtime(group: object, device: torch.device, *, overlaps: bool) -> Runtime:
    """Return what the lane of a job on `group` runs on."""
    if isinstance(group, BringsRuntime):
        return group.lane_runtime(overlaps=overlaps)
    return ThreadRuntime(device) if overlaps else InlineRuntime()


class Arrived(Generic[T]):
    """Work whose result has been taken, to be taken again."""

    def __init__(self, result: T) -> None:
        self._result = result

    def done(self) -> bool:
        """See `Pending.done`."""
        return True

    def result(self) -> T:
        """See `Pending.result`."""
        return self._result


class InlineRuntime:
    """Performs work in the caller, when it asks for the result: the synchronous strategies, which wait for it all."""

    def spawn(self, work: Callable[[], T]) -> Pending[T]:
        """See `Runtime.spawn`."""
        return _Deferred(work)

    def now(self) -> float:
        """Return seconds of the process's monotonic clock."""
        return time.perf_counter()

    def charge(self, work: Work, elements: int = 0) -> None:
        """Real work takes its own time."""

    def join(self) -> None:
        """Nothing is ever under way."""

    def leave(self) -> None:
        """Nothing is ever under way."""


class _Deferred(Generic[T]):
    """Work that nobody else performs."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work

    def done(self) -> bool:
        return False

    def result(self) -> T:
        return self._work()


class ThreadRuntime:
    """Performs work on one thread beside the caller, and on CUDA on a stream beside the caller's.

    Note [Streams]
        Work starts once the stream that spawned it has reached the call, and a stream that takes the result
        waits for the side stream: host code is never blocked by either. Buffers outlive both streams' use of
        them, so the allocator needs no `record_stream`.
    """

    def __init__(self, device: torch.device) -> None:
        # MKL counts threads by calling thread, and takes all cores where it has not been told: beside a busy
        # compute lane that cost 40 ms for an optimizer step of 0.2 ms.
        self._executor = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="stretto-lane",
            initializer=torch.set_num_threads,
            initargs=(torch.get_num_threads(),),
        )
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def spawn(self, work: Callable[[], T]) -> Pending[T]:
        """See `Runtime.spawn`."""
        if self._side is None:
            return self._executor.submit(work)
        return _OnStream(self._executor, self._side, work)

    def now(self) -> float:
        """Return seconds of the process's monotonic clock."""
        return time.perf_counter()

    def charge(self, work: Work, elements: int = 0) -> None:
        """Real work takes its own time."""

    def join(self) -> None:
        """See `Runtime.join`."""
        self._executor.shutdown(wait=True)

    def leave(self) -> None:
        """See `Runtime.leave`."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class _OnStream(Generic[T]):
    """Work on a side stream; see Note [Streams]."""

    def __init__(self, executor: ThreadPoolExecutor, side: torch.cuda.Stream, work: Callable[[], T]) -> None:
        started = torch.cuda.current_stream(side.device).record_event()
        self._side = side
        self._future = executor.submit(self._run, started, work)

    def _run(self, started: torch.cuda.Event, work: Callable[[], T]) -> tuple[T, torch.cuda.Event]:
        with torch.cuda.stream(self._side):
            self._side.wait_event(started)
            result = work()
            return result, self._side.record_event()

    def done(self) -> bool:
        return self._future.done() and (
            self._future.exception() is not None or self._future.result()[1].query()
        )

    def result(self) -> T:
        result, finished = self._future.result()
        torch.cuda.current_stream(self._side.device).wait_event(finished)
        return result
