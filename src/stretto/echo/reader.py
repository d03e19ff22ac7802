"""Reading ahead: a thread fetches the next fresh batches while held ones are used.

The loader's iterator is made on the caller's thread, because that is where a loader's workers should be forked. The
reading thread only calls `next`. An exception of the loader is raised again where its batch is asked for, with its own
traceback.

Batches go from the reading thread to the caller in one queue, and permits to read another batch come back in a second
one. Both are `SimpleQueue`s, which are written in C: to put something in wakes no thread unless one waits.

An iterator with a clock of its own, such as one on a virtual cluster, brings its own reader (`BringsReader`).
"""

import queue
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from stretto.errors import OutOfTurn

CLOSING_SECONDS = 10.0
"""How long `close` waits for a read that is under way. A loader that never answers must not stop the process."""

WAKE_SECONDS = 0.1
"""How often a wait is interrupted so that Python can handle signals. PyTorch reports the death of a loader's worker by
a signal. It may arrive while the reading thread runs, but only the main thread can handle it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """What one call of `next` gave."""

    batch: Any
    """The batch; None at the end."""
    has_ended: bool
    """Whether the data ended instead."""
    seconds: float
    """Time that the call took."""
    state: Any
    """State of the loader after the call; None for a loader without a state."""


class Reader(Protocol):
    """Reads one pass over a loader."""

    def now(self) -> float:
        """Return the time in seconds, on the clock by which batches are ready or late."""
        ...

    def is_ready(self) -> bool:
        """Return whether `take` would return without waiting."""
        ...

    def take(self) -> Fetched:
        """Return the next batch, and wait for it if necessary. After the end, return the end again.

        Raises:
            OutOfTurn: The reader was closed.
            Exception: The loader's own.
        """
        ...

    def close(self, *, waits: bool = True) -> None:
        """End the reader. A second call does nothing.

        Args:
            waits: Whether to wait for the read that is under way.
        """
        ...


@runtime_checkable
class BringsReader(Protocol):
    """An iterator over batches that is to be read by a reader of its own."""

    def open_reader(self, capture: Callable[[], Any], ahead: int) -> Reader:
        """Return the reader of this pass; the arguments are those of `ThreadReader`."""
        ...


def open_reader(iterator: Iterator[Any], capture: Callable[[], Any], ahead: int) -> Reader:
    """Return a reader of `iterator`; the arguments are those of `ThreadReader`."""
    if isinstance(iterator, BringsReader):
        return iterator.open_reader(capture, ahead)
    return ThreadReader(iterator, capture, ahead)


class ThreadReader(Reader):
    """Reads in the background, on a thread of its own.

    Args:
        iterator: Gives the batches of one pass.
        capture: Returns a copy of the loader's state; called after every read.
        ahead: Number of batches to have ready. With 0 a batch is read when it is asked for, on the caller's thread.
    """

    def __init__(self, iterator: Iterator[Any], capture: Callable[[], Any], ahead: int) -> None:
        self._iterator = iterator
        self._capture = capture
        self._ready: queue.SimpleQueue[Fetched | BaseException] = queue.SimpleQueue()
        """What has been read and not yet taken."""
        self._permits: queue.SimpleQueue[None] = queue.SimpleQueue()
        """One entry for every batch that may be read now."""
        self._last: Fetched | BaseException | None = None
        """The end of the data or an error, once it has been taken: the answer to every later call too."""
        self._is_closed = False
        self._thread: threading.Thread | None = None
        if ahead > 0:
            for _ in range(ahead):
                self._permits.put(None)
            self._thread = threading.Thread(target=self._run, name="stretto-reader", daemon=True)
            self._thread.start()

    def now(self) -> float:
        return time.perf_counter()

    def is_ready(self) -> bool:
        return self._last is not None or not self._ready.empty()

    def take(self) -> Fetched:
        if self._is_closed:
            raise OutOfTurn(
                "this pass over the loader has been closed: by close(), or because another iterator was begun"
            )
        outcome = fetch(self._iterator, self._capture) if self._thread is None else self._wait()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def close(self, *, waits: bool = True) -> None:
        self._is_closed = True
        self._permits.put(None)
        self._ready.put(OutOfTurn("this pass over the loader was closed while a batch was waited for"))
        # While the interpreter ends, daemon threads do not run any more.
        if waits and self._thread is not None and not sys.is_finalizing():
            self._thread.join(CLOSING_SECONDS)
            if self._thread.is_alive():
                warnings.warn(
                    f"the loader has not returned from a read for {CLOSING_SECONDS:g} s while it was being closed; "
                    "its thread is left behind",
                    ResourceWarning,
                    stacklevel=2,
                )

    def _wait(self) -> Fetched | BaseException:
        """Return what the thread has read next."""
        if self._last is not None:
            return self._last
        while True:
            try:
                outcome = self._ready.get(timeout=WAKE_SECONDS)
                break
            except queue.Empty:
                continue
        if is_last(outcome):
            self._last = outcome
        else:
            self._permits.put(None)
        return outcome

    def _run(self) -> None:
        """Read a batch for every permit; runs on the thread."""
        is_over = False
        while not is_over:
            self._permits.get()
            if self._is_closed:
                return
            outcome = fetch(self._iterator, self._capture)
            is_over = is_last(outcome)
            self._ready.put(outcome)


def fetch(iterator: Iterator[Any], capture: Callable[[], Any]) -> Fetched | BaseException:
    """Return the next batch, or the exception that the loader raises: `take` raises it on the caller's thread."""
    started = time.perf_counter()
    try:
        batch = next(
            iterator, iterator
        )  # the iterator itself stands for the end, because None may be a batch
        seconds = time.perf_counter() - started
        has_ended = batch is iterator
        return Fetched(
            batch=None if has_ended else batch, has_ended=has_ended, seconds=seconds, state=capture()
        )
    except BaseException as error:
        return error


def is_last(outcome: Fetched | BaseException) -> bool:
    """Return whether nothing comes after `outcome`: it is the end of the data, or an error."""
    return isinstance(outcome, BaseException) or outcome.has_ended
