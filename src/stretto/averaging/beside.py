"""A second lane of one rank's job, for what travels beside the user's thread while that goes on stepping."""

from collections.abc import Callable
from typing import TypeVar

from stretto.engine.runtime import Pending, Runtime, Timer, Work

T = TypeVar("T")


class WithLaneBeside(Runtime):
    """A runtime that ends together with a lane beside it.

    Args:
        runtime: Of the job's rounds.
        beside: Performs what is handed to it there, one piece after the other.
    """

    def __init__(self, runtime: Runtime, beside: Runtime) -> None:
        self.beside = beside
        self._runtime = runtime

    def spawn(self, work: Callable[[], T]) -> Pending[T]:
        """Start `work` on the lane of the rounds."""
        return self._runtime.spawn(work)

    def now(self) -> float:
        """Return seconds on the clock that both share."""
        return self._runtime.now()

    def timer(self) -> Timer:
        """Return a timer on it."""
        return self._runtime.timer()

    def keep_pace(self) -> None:
        """Let the host wait for work before."""
        self._runtime.keep_pace()

    def charge(self, work: Work, elements: int = 0) -> None:
        """Advance a virtual clock by the time of `work`."""
        self._runtime.charge(work, elements)

    def pass_backward(self, share: float) -> None:
        """Advance a virtual clock within a backward pass."""
        self._runtime.pass_backward(share)

    def join(self) -> None:
        """Wait for both lanes, then end them."""
        self._runtime.join()
        self.beside.join()

    def leave(self) -> None:
        """End both lanes after an error, without waiting."""
        self._runtime.leave()
        self.beside.leave()
