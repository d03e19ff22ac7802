"""Where the communication lane runs: in the caller's thread, or on a second thread.

A runtime separates the engine from the machine. The lane's code is the same on every runtime. Those of devices that
work after their host, and which one a job gets: `stretto.engine.on_device`.
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
        """Wait, then return what the work returned or raise what it raised."""
        ...


class Timer(Protocol):
    """Measures stretches of one lane's work, one after the other; see Note [Late times] in `engine/streams.py`."""

    @property
    def mark(self) -> Callable[[], Any]:
        """Returns where the calling lane is now: the beginning of a stretch."""
        ...

    def since(self, mark: Any) -> float:
        """End a stretch, and return the seconds of all stretches that have become known since the last call."""
        ...


class VirtualTime(Protocol):
    """The clock of one rank on which work takes the time that a model of the machine says."""

    def charge(self, work: Work, elements: int) -> None:
        """Advance the clock by the time of `work` on that many `elements`."""
        ...

    def pass_backward(self, share: float) -> None:
        """Advance it to where `share` of a micro-batch's backward pass is over, before the micro-batch is charged."""
        ...


class Runtime(Protocol):
    """Runs one lane's work, one piece after the other."""

    virtual_time: VirtualTime | None
    """Charged for work; None where real work takes real time."""

    def spawn(self, work: Callable[[], T]) -> Pending[T]:
        """Start `work` after everything spawned before."""
        ...

    def now(self) -> float:
        """Return seconds on this runtime's clock."""
        ...

    def timer(self) -> Timer:
        """Return a timer for one lane, which shall measure how long work takes where it is done."""
        ...

    def keep_pace(self) -> None:
        """Let the host wait until all work before its last call of this is done; called once per micro-batch."""
        ...

    def join(self) -> None:
        """Wait for everything that was spawned, then end."""
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
    """A timer by the host's clock, or a virtual one: work ends before the call that asks for it returns."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.mark = now

    def since(self, mark: float) -> float:
        """Return the seconds of the stretch that began at `mark`."""
        return self.mark() - mark


class OnHost(Runtime):
    """Work that the host does itself, in real time."""

    virtual_time = None
    now = staticmethod(time.perf_counter)

    def timer(self) -> Timer:
        return HostTimer(time.perf_counter)

    def keep_pace(self) -> None:
        """Do nothing: the host has done what it has called."""


class RuntimeOver(Runtime):
    """A runtime that hands everything on to another; a subclass says what it does besides.

    Args:
        runtime: That one.
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
    """Performs work in the caller's thread, when its result is taken; for synchronous strategies, which wait anyway."""

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
        """Wait for everything that was spawned, and end the thread."""
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
    """Give a new thread what its parent has: the number of threads, and on CUDA the device.

    A new thread begins on device 0. Leaving a stream context makes that current, for which CUDA makes a context: half
    a GiB on device 0 for every rank of the machine.
    """
    torch.set_num_threads(num_threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
