"""The streams of an asynchronous device: the order between them, and times on them.

Note [Streams]
    Work starts after the stream that spawned it has reached the call. A stream that takes the result waits for the
    side stream. Neither wait blocks host code, and neither does a wait for a collective that orders streams: work
    that is queued next comes after it. So the host may drop a tensor that its stream has not read yet.

    Memory that is freed goes back to the stream that allocated it, and is given again in that stream's order. So each
    lane may free what it has allocated itself, at any time. What crosses from one lane to the other is freed by no
    code before an installation or a rejoining has ordered the streams: buffers, sums, scratch memory and masters live
    as long as the job, a round and a fragment's values until they are installed. Scratch memory that becomes too
    small while an early reduction is queued is the only exception, and it is marked (`record_stream`).

Note [Late times]
    No code waits for a time. A device ends a stretch long after the host has called for its end. So a stretch is
    counted when the host asks next and finds that the device has passed it, in general a round later. Sums over many
    updates are right. A single update may have the stretches of another, and the stretches of a job's last round are
    not counted.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch

T = TypeVar("T")


class Mark(Protocol):
    """A position in the work of a stream."""

    def query(self) -> bool:
        """Return whether the device has reached it."""
        ...

    def synchronize(self) -> None:
        """Let the host wait until the device has reached it."""
        ...

    def elapsed_time(self, later: Any, /) -> float:
        """Return the milliseconds from here to a later position that the device has reached."""
        ...


class Streams(Protocol):
    """The streams of one device: the calling thread's stream, and a stream for the communication lane."""

    def mark(self) -> Mark:
        """Return the current position in the work of the calling thread's stream."""
        ...

    def follow(self, mark: Mark) -> None:
        """Let later work on this thread's stream wait for `mark`; the host continues."""
        ...

    def beside(self) -> AbstractContextManager[object]:
        """Let the calling thread use the other stream during the block."""
        ...


class CudaStreams:
    """Streams of a CUDA device.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        """Return an event with its time, on the calling thread's stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def follow(self, mark: Any) -> None:
        """Let the calling thread's stream wait for `mark`."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def beside(self) -> AbstractContextManager[object]:
        """Let the calling thread use the side stream."""
        return torch.cuda.stream(self._side)


class SideStream:
    """A second stream, for work that the caller queues; see Note [Streams].

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def queued(self) -> Iterator[None]:
        """Queue the block on the side stream, after all earlier work of the caller's stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def rejoin(self) -> None:
        """Let the caller's stream continue after all work queued on the side stream."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


class StreamTimer:
    """Measures a device's work in intervals on the calling lane's stream; see Note [Late times].

    Args:
        streams: Streams of the device.
    """

    def __init__(self, streams: Streams) -> None:
        self._late: deque[tuple[Mark, Mark]] = deque()
        self.mark = streams.mark

    def since(self, mark: Mark) -> float:
        """End an interval, and return the seconds of all intervals that the device has passed since the last call."""
        self._late.append((mark, self.mark()))
        seconds = 0.0
        while self._late and self._late[0][1].query():
            started, stopped = self._late.popleft()
            seconds += started.elapsed_time(stopped) / 1000
        return seconds


class OnStream(Generic[T]):
    """Work on a side stream; see Note [Streams]."""

    def __init__(self, thread: Executor, streams: Streams, work: Callable[[], T]) -> None:
        self._streams = streams
        self._future = thread.submit(self._run, streams.mark(), work)

    def _run(self, started: Mark, work: Callable[[], T]) -> tuple[T, Mark]:
        with self._streams.beside():
            self._streams.follow(started)
            result = work()
            return result, self._streams.mark()

    def done(self) -> bool:
        return self._future.done() and (
            self._future.exception() is not None or self._future.result()[1].query()
        )

    def result(self) -> T:
        result, finished = self._future.result()
        self._streams.follow(finished)
        return result
