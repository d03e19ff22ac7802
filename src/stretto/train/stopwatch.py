"""Training time: wall time, and time on processors, without what only looks at the run."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stopwatch:
    """Runs from its making, but for the blocks in which it is held.

    Args:
        before: Seconds that an earlier part of the run has taken.
        now: The clock, in seconds; a virtual cluster has its own.
    """

    def __init__(self, before: float = 0.0, now: Callable[[], float] = time.perf_counter) -> None:
        self._wall = _Hand(now, before)
        self._cpu = _Hand(time.process_time, 0.0)

    @property
    def seconds(self) -> float:
        """Training time so far."""
        return self._wall.seconds

    @property
    def cpu_seconds(self) -> float:
        """Time that all threads of the process have spent on processors, in this part of the run."""
        return self._cpu.seconds

    @contextmanager
    def held(self) -> Iterator[None]:
        """Leave the time spent in the block out; blocks do not nest."""
        with self._wall.held(), self._cpu.held():
            yield


class _Hand:
    """Reads one clock."""

    def __init__(self, clock: Callable[[], float], before: float) -> None:
        self._clock = clock
        self._started = clock() - before
        self._held_at: float | None = None

    @property
    def seconds(self) -> float:
        now = self._clock() if self._held_at is None else self._held_at
        return now - self._started

    @contextmanager
    def held(self) -> Iterator[None]:
        self._held_at = self._clock()
        try:
            yield
        finally:
            self._started += self._clock() - self._held_at
            self._held_at = None
