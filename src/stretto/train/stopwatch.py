"""Training time: wall time without what only looks at the run."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Runs from its making, but for the blocks in which it is held.

    Args:
        before: Seconds that an earlier part of the run has taken.
    """

    def __init__(self, before: float = 0.0) -> None:
        self._started = time.perf_counter() - before
        self._held_at: float | None = None

    @property
    def seconds(self) -> float:
        """Training time so far."""
        now = time.perf_counter() if self._held_at is None else self._held_at
        return now - self._started

    @contextmanager
    def held(self) -> Iterator[None]:
        """Leave the time spent in the block out; blocks do not nest."""
        self._held_at = time.perf_counter()
        try:
            yield
        finally:
            self._started += time.perf_counter() - self._held_at
            self._held_at = None
