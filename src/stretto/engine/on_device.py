"""Runtimes for a device that works asynchronously to its host, and the choice of a job's runtime."""

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol, TypeVar, runtime_checkable

import torch

from stretto.engine.runtime import (
    InlineRuntime,
    OnHost,
    Pending,
    Runtime,
    ThreadRuntime,
    Timer,
    thread_of_lane,
)
from stretto.engine.streams import CudaStreams, Mark, OnStream, Streams, StreamTimer

T = TypeVar("T")


@runtime_checkable
class BringsRuntime(Protocol):
    """A process group with its own clock, such as a virtual cluster's: it provides the runtime of its lanes."""

    def lane_runtime(self, *, overlaps: bool) -> Runtime:
        """Return a runtime for one job's lane.

        Args:
            overlaps: Whether the lane runs at the same time as the caller; otherwise work is performed when its
                result is taken.
        """
        ...


def choose_runtime(group: object, device: torch.device, *, overlaps: bool) -> Runtime:
    """Return the runtime for the communication lane of a job on `group`."""
    if isinstance(group, BringsRuntime):
        return group.lane_runtime(overlaps=overlaps)
    if device.type != "cuda":
        return ThreadRuntime(thread_of_lane(device)) if overlaps else InlineRuntime()
    streams = CudaStreams(device)
    return StreamRuntime(streams, thread_of_lane(device)) if overlaps else InlineOnDevice(streams)


class _OnDevice(OnHost):
    """Work that a device does asynchronously to the host."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._last: Mark | None = None  # where the host has kept pace

    def timer(self) -> Timer:
        return StreamTimer(self._streams)

    def keep_pace(self) -> None:
        before, self._last = self._last, self._streams.mark()
        if before is not None:
            before.synchronize()


class InlineOnDevice(_OnDevice, InlineRuntime):
    """Performs work in the caller's thread and on its stream, when its result is taken."""


class StreamRuntime(_OnDevice, ThreadRuntime):
    """Performs work on a second thread and a second stream; for their order see Note [Streams] in `engine/streams.py`.

    Args:
        streams: Streams of the device.
        thread: Runs one piece of work after the other.
    """

    def __init__(self, streams: Streams, thread: Executor) -> None:
        _OnDevice.__init__(self, streams)
        ThreadRuntime.__init__(self, thread)

    def spawn(self, work: Callable[[], T]) -> Pending[T]:
        """Start `work` on the thread and the side stream, after everything spawned before."""
        return OnStream(self._thread, self._streams, work)
