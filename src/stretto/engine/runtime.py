"""Where the communication lane runs: in the caller's thread, or on a thread beside it.

A runtime separates the engine from the machine. The lane's code is the same on every runtime.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
        """Advance a virtual clock by the time of `work` on that many `elements`; a real clock needs no help."""
        ...

    def pass_backward(self, share: float) -> None:
        """Advance a virtual clock to where `share` of a micro-batch's backward pass is over, before it is charged."""
        ...

    def join(self) -> None:
        """Wait for everything that was spawned, then end."""
        ...

    def leave(self) -> None:
        """End after an error, without waiting: running work ends by itself, waiting work is dropped."""
        ...


@runtime_checkable
class BringsRuntime(Protocol):
    """A process group with its own clock, such as a virtual cluster's: it provides the runtime of its lanes."""

    def lane_runtime(self, *, overlaps: bool) -> Runtime:
        """Return a runtime for one job's lane.

        Args:
            overlaps: Whether the lane runs beside the caller; otherwise work is performed when its result is taken.
        """
        ...


def choose_runtime(group: object, device: torch.device, *, overlaps: bool) -> Runtime:
    """Return the runtime for the communication lane of a job on `group`."""
    if isinstance(group, BringsRuntime):
        return group.lane_runtime(overlaps=overlaps)
    return ThreadRuntime(device) if overlaps else InlineRuntime()


class Arrived(Generic[T]):
    """Work that is complete; its result can be taken again."""

    def __init__(self, result: T) -> None:
        self._result = result

    def done(self) -> bool:
        """Return True: the result is there."""
        return True

    def result(self) -> T:
        """Return the result."""
        return self._result


class InlineRuntime:
    """Performs work in the caller's thread, when its result is taken; for synchronous strategies, which wait anyway."""

    def spawn(self, work: Callable[[], T]) -> Pending[T]:
        """Keep `work` until its result is taken."""
        return _Deferred(work)

    def now(self) -> float:
        """Return seconds of the process's monotonic clock."""
        return time.perf_counter()

    def charge(self, work: Work, elements: int = 0) -> None:
        """Do nothing: real work takes real time."""

    def pass_backward(self, share: float) -> None:
        """Do nothing: real work takes real time."""

    def join(self) -> None:
        """Do nothing: no work is ever under way."""

    def leave(self) -> None:
        """Do nothing: no work is ever under way."""


class _Deferred(Generic[T]):
    """Work that runs in the caller's thread when its result is taken."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work

    def done(self) -> bool:
        return False

    def result(self) -> T:
        return self._work()


class ThreadRuntime:
    """Performs work on one thread beside the caller; on CUDA, also on a stream beside the caller's stream.

    Note [Streams]
        Work starts after the stream that spawned it has reached the call. A stream that takes the result waits for
        the side stream. Neither wait blocks host code, and neither does one for a collective that orders streams: what
        is queued next comes after it. So the host may be through with a tensor that its stream has not read yet.

        Memory that is freed goes back to the stream that allocated it, and is given again in that stream's order. So
        each lane may free what it has allocated itself, at any time. What crosses from one lane to the other is freed
        by nobody before a landing or a rejoining has ordered the streams: buffers, sums, scratch memory and masters
        live as long as the job, a round and what a fragment carries until they have landed. Scratch memory that
        becomes too small while a departure is queued is the only exception, and it is marked (`record_stream`).
    """

    def __init__(self, device: torch.device) -> None:
        # MKL keeps a thread count per calling thread, and uses all cores where none was set. Beside a busy compute
        # lane, an optimizer step of 0.2 ms then took 40 ms.
        self._executor = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="stretto-lane",
            initializer=_begin_thread,
            initargs=(torch.get_num_threads(), device),
        )
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def spawn(self, work: Callable[[], T]) -> Pending[T]:
        """Start `work` on the thread, after everything spawned before."""
        if self._side is None:
            return self._executor.submit(work)
        return _OnStream(self._executor, self._side, work)

    def now(self) -> float:
        """Return seconds of the process's monotonic clock."""
        return time.perf_counter()

    def charge(self, work: Work, elements: int = 0) -> None:
        """Do nothing: real work takes real time."""

    def pass_backward(self, share: float) -> None:
        """Do nothing: real work takes real time."""

    def join(self) -> None:
        """Wait for everything that was spawned, and end the thread."""
        self._executor.shutdown(wait=True)

    def leave(self) -> None:
        """End without waiting; work that has not started is dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _begin_thread(num_threads: int, device: torch.device) -> None:
    """Give a new thread what its parent has: the number of threads, and on CUDA the device.

    A new thread begins on device 0. Leaving a stream context makes that current, for which CUDA makes a context: half
    a GiB on device 0 for every rank of the machine.
    """
    torch.set_num_threads(num_threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)


class SideStream:
    """A stream beside the caller's, for work that the caller queues itself; see Note [Streams].

    Args:
        device: Of the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def queued(self) -> Iterator[None]:
        """Queue the block there, after all that the caller's stream has been given."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def rejoin(self) -> None:
        """Let the caller's stream go on after all that was queued."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


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
