"""Where the communication lane runs: in the caller's thread, or on a second thread.

A runtime separates the engine from the machine; the lane's code is the same on every runtime.
`stretto.engine.on_device` has the runtimes for asynchronous devices, and chooses a job's runtime.
"""

import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Work = Literal["micro-batch", "step", "preview"]
"""Kinds of work that take time on a device."""


class Pending(Protocol[T_co]):
    """Work in progress; `result` must be taken exactly once."""

    def done(self) -> bool:
        """Return whether `result` would not wait."""
        ...

    def result(self) -> T_co:
        """Wait, then return the work's result or raise its error."""
        ...


class Timer(Protocol):
    """Measures intervals of one lane's work, one after the other; see Note [Late times] in `engine/streams.py`."""

    @property
    def mark(self) -> Callable[[], Any]:
        """Return the current position of the calling lane, where an interval starts."""
        ...

    def since(self, mark: Any) -> float:
        """End an interval, and return the seconds of all intervals that became known since the last call."""
        ...


class VirtualTime(Protocol):
    """The clock of one rank in virtual time, which a model of the machine advances."""

    def charge(self, work: Work, elements: int) -> None:
        """Advance the clock by the time of `work` on that many `elements`."""
        ...

    def pass_backward(self, share: float) -> None:
        """Advance it to the point where `share` of a micro-batch's backward pass is over; `charge` completes the
        micro-batch.
        """
        ...


class Runtime(Protocol):
    """Runs one lane's work, one piece after the other."""

    virtual_time: VirtualTime | None
    """The virtual clock to charge for work; None if work takes real time."""

    def spawn(self, work: Callable[[], T]) -> Pending[T]:
        """Start `work` after everything spawned before."""
        ...

    def now(self) -> float:
        """Return seconds on this runtime's clock."""
        ...

    def timer(self) -> Timer:
        """Return a timer for one lane, which measures the time of work on the device that does it."""
        ...

    def keep_pace(self) -> None:
        """Let the host wait for all work before its previous call of this method; called once per micro-batch."""
        ...

    def join(self) -> None:
        """Wait for all spawned work, then end."""
        ...

    def leave(self) -> None:
        """End after an error, without waiting: running work ends alone, waiting work is dropped."""
        ...


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


class HostTimer:
    """A timer by the host's clock, or a virtual clock: work is complete when the call for it returns."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.mark = now

    def since(self, mark: float) -> float:
        """Return the seconds of the interval that began at `mark`."""
        return self.mark() - mark


class OnHost(Runtime):
    """Work that the host does itself, in real time."""

    virtual_time = None
    now = staticmethod(time.perf_counter)

    def timer(self) -> Timer:
        return HostTimer(time.perf_counter)

    def keep_pace(self) -> None:
        """Do nothing: the host is synchronous."""


class RuntimeOver(Runtime):
    """A runtime that delegates to another; a subclass adds behaviour.

    Args:
        runtime: The other runtime.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.virtual_time = runtime.virtual_time

    def spawn(self, work: Callable[[], T]) -> Pending[T]:
        return self._runtime.spawn(work)

    def now(self) -> float:
        return self._runtime.now()

    def timer(self) -> Timer:
        return self._runtime.timer()

    def keep_pace(self) -> None:
        self._runtime.keep_pace()

    def join(self) -> None:
        self._runtime.join()

    def leave(self) -> None:
        self._runtime.leave()


class InlineRuntime(OnHost):
    """Performs work in the caller's thread, when its result is taken; for synchronous strategies, which would wait
    anyway.
    """

    def spawn(self, work: Callable[[], T]) -> Pending[T]:
        """Keep `work` until its result is taken."""
        return _Deferred(work)

    def join(self) -> None:
        """Do nothing: no work is ever in progress."""

    def leave(self) -> None:
        """Do nothing: no work is ever in progress."""


class _Deferred(Generic[T]):
    """Work that runs in the caller's thread when its result is taken."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work

    def done(self) -> bool:
        return False

    def result(self) -> T:
        return self._work()


class ThreadRuntime(OnHost):
    """Performs work on a second thread.

    Args:
        thread: Runs one piece of work after the other.
    """

    def __init__(self, thread: Executor) -> None:
        self._thread = thread

    def spawn(self, work: Callable[[], T]) -> Pending[T]:
        """Start `work` on the thread, after everything spawned before."""
        return self._thread.submit(work)

    def join(self) -> None:
        """Wait for all spawned work, and end the thread."""
        self._thread.shutdown(wait=True)

    def leave(self) -> None:
        """End without waiting; work that has not started is dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def thread_of_lane(device: torch.device) -> Executor:
    """Return a thread for the communication lane of a job on `device`."""
    # MKL keeps a thread count per calling thread, and uses all cores where none was set. Beside a busy compute
    # lane, an optimizer step of 0.2 ms then took 40 ms.
    return ThreadPoolExecutor(
        max_workers=1,
        thread_name_prefix="stretto-lane",
        initializer=_begin_thread,
        initargs=(torch.get_num_threads(), device),
    )


def _begin_thread(num_threads: int, device: torch.device) -> None:
    """Set the number of threads and, on CUDA, the device of a new thread, as in its parent.

    A new thread begins on device 0. Leaving a stream context makes that current, for which CUDA makes a context: half
    a GiB on device 0 for every rank of the machine.
    """
    torch.set_num_threads(num_threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
