"""Fetches fresh batches ahead, on a thread of its own, while batches in hand are used.

The iterator is made on the caller's thread, because a loader's workers should be forked there; the thread only calls
`next`. Whatever the loader raises is raised again where the batch is asked for, with its own traceback.

Two queues: batches go one way, leave to read another one the other way. Both are written in C; where nobody waits at
the other end, passing something on wakes no thread.

An iterator whose time is not the machine's, such as a virtual cluster's, brings a reader of its own.
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
"""How long closing waits for a read under way. A store that never answers must not keep the process."""

WAKE_SECONDS = 0.1
"""How often a wait lets pending signals in: the death of a loader's worker is told by one, which may reach the process
on the reader's thread while it must be answered on the main one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """What one call of `next` gave."""

    batch: Any
    """The batch; None at the end."""
    has_ended: bool
    """Whether there was none."""
    seconds: float
    """Duration of the call."""
    state: Any
    """The loader's state after it."""


class Reader(Protocol):
    """Reads one pass of a loader."""

    def now(self) -> float:
        """Return seconds on the clock by which batches are ready or waited for."""
        ...

    def is_ready(self) -> bool:
        """Whether `take` would return at once."""
        ...

    def take(self) -> Fetched:
        """Return the next batch, waiting for it if need be; after the end, the end again.

        Raises:
            OutOfTurn: The reader was closed.
            Exception: Whatever the loader raised.
        """
        ...

    def close(self, *, waits: bool = True) -> None:
        """End, after the read under way; again has no effect.

        Args:
            waits: Whether to return only when it has ended.
        """
        ...


@runtime_checkable
class BringsReader(Protocol):
    """An iterator over batches with a time of its own."""

    def open_reader(self, capture: Callable[[], Any], ahead: int) -> Reader:
        """Return what reads this pass; the arguments are those of `ThreadReader`."""
        ...


def open_reader(iterator: Iterator[Any], capture: Callable[[], Any], ahead: int) -> Reader:
    """Begin to read a pass; the arguments are those of `ThreadReader`."""
    if isinstance(iterator, BringsReader):
        return iterator.open_reader(capture, ahead)
    return ThreadReader(iterator, capture, ahead)


class ThreadReader:
    """Reads in the background.

    Args:
        iterator: Of the pass.
        capture: Returns the loader's state.
        ahead: Batches to have ready; with 0 they are read when asked for, on the asking thread.
    """

    def __init__(self, iterator: Iterator[Any], capture: Callable[[], Any], ahead: int) -> None:
        self._iterator = iterator
        self._capture = capture
        self._ready: queue.SimpleQueue[Fetched | BaseException] = queue.SimpleQueue()
        self._leave: queue.SimpleQueue[None] = queue.SimpleQueue()
        """One entry for every batch that may be read now."""
        self._last: Fetched | BaseException | None = None
        """The end or an error, once it has been taken: the answer to every later call too."""
        self._is_closed = False
        self._thread: threading.Thread | None = None
        if ahead > 0:
            for _ in range(ahead):
                self._leave.put(None)
            self._thread = threading.Thread(target=self._run, name="stretto-reader", daemon=True)
            self._thread.start()

    def now(self) -> float:
        """See `Reader.now`."""
        return time.perf_counter()

    def is_ready(self) -> bool:
        """See `Reader.is_ready`."""
        return self._last is not None or not self._ready.empty()

    def take(self) -> Fetched:
        """See `Reader.take`."""
        if self._is_closed:
            raise OutOfTurn(
                "this pass over the loader has been closed: another iterator was begun, or close() called"
            )
        outcome = fetch(self._iterator, self._capture) if self._thread is None else self._wait()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def close(self, *, waits: bool = True) -> None:
        """See `Reader.close`."""
        self._is_closed = True
        self._leave.put(None)
        self._ready.put(OutOfTurn("this pass over the loader was closed while a batch was waited for"))
        # At the interpreter's end the thread, a daemon, is frozen already.
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
            self._leave.put(None)
        return outcome

    def _run(self) -> None:
        """Read whenever there is leave to; the body of the thread."""
        is_over = False
        while not is_over:
            self._leave.get()
            if self._is_closed:
                return
            outcome = fetch(self._iterator, self._capture)
            is_over = is_last(outcome)
            self._ready.put(outcome)


def fetch(iterator: Iterator[Any], capture: Callable[[], Any]) -> Fetched | BaseException:
    """Return what `next` gives, or raises: `take` raises it again, on the thread that asks."""
    started = time.perf_counter()
    try:
        batch = next(iterator, iterator)  # itself stands for "none", since None may be a batch
        seconds = time.perf_counter() - started
        has_ended = batch is iterator
        return Fetched(
            batch=None if has_ended else batch, has_ended=has_ended, seconds=seconds, state=capture()
        )
    except BaseException as error:
        return error


def is_last(outcome: Fetched | BaseException) -> bool:
    """Whether nothing comes after `outcome`."""
    return isinstance(outcome, BaseException) or outcome.has_ended
