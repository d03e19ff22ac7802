"""A device that does later what its host calls, in time that passes only where a test says; and a job on it."""

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from stretto.engine.on_device import InlineOnDevice, StreamRuntime
from stretto.engine.runtime import Runtime
from stretto.groups import SoloGroup


class LateDevice:
    """Two streams, each with the moment at which it has done all it was given; the host's clock is the test's."""

    def __init__(self) -> None:
        self.host = 0.0
        self._done = {"own": 0.0, "side": 0.0}
        self._stream = "own"

    @property
    def place(self) -> float:
        """When the calling stream comes to what it is given now: not before it is given."""
        return max(self._done[self._stream], self.host)

    def call(self, seconds: float) -> None:
        """Give the calling stream work that takes so long; the host goes on."""
        self._done[self._stream] = self.place + seconds

    def mark(self) -> "Place":
        return Place(self, self.place)

    def follow(self, mark: "Place") -> None:
        self._done[self._stream] = max(self.place, mark.at)

    @contextmanager
    def beside(self) -> Iterator[None]:
        before, self._stream = self._stream, "side"
        try:
            yield
        finally:
            self._stream = before


@dataclasses.dataclass(frozen=True)
class Place:
    """An event, and when the device comes to it."""

    device: LateDevice
    at: float

    def query(self) -> bool:
        return self.at <= self.device.host

    def synchronize(self) -> None:
        self.device.host = max(self.device.host, self.at)

    def elapsed_time(self, later: "Place") -> float:
        assert later.query(), "the time of an event that the device has not come to"
        return 1000 * (later.at - self.at)


class AtOnce(Executor):
    """Runs work when it is submitted: a lane whose host code takes no time."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **settings: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*args, **settings))
        except BaseException as error:
            future.set_exception(error)
        return future


class OnLateDevice(SoloGroup):
    """A lone rank on such a device; the next collective takes `next_seconds`, and those after it nothing."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self.device = device
        self.next_seconds = 0.0

    def private(self) -> "OnLateDevice":
        return self

    def lane_runtime(self, *, overlaps: bool) -> Runtime:
        return StreamRuntime(self.device, AtOnce()) if overlaps else InlineOnDevice(self.device)

    def perform(self, call: Any) -> dist.Work:
        seconds, self.next_seconds = self.next_seconds, 0.0
        self.device.call(seconds)
        return super().perform(call)
