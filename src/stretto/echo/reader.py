"""Reading ahead: a thread fetches the next fresh batches while held ones are used.

The loader's iterator is made on the caller's thread, where a loader's workers should be forked. The reading thread only
calls `next`. An exception of the loader is raised again when its batch is requested, with its own traceback.

A loader may write every batch into the same memory: a plain loop no longer needs a batch when it asks for the next. A
batch that is read ahead is not used by then, so the reader copies it. Batches from worker processes need no copy.

Batches go from the reading thread to the caller in one queue, and permits to read another batch come back in a second
one. Both are `SimpleQueue`s, which are written in C: to put something in wakes no thread unless one waits.

An iterator with its own clock, such as one on a virtual cluster, brings its own reader (`BringsReader`).
"""

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from stretto.echo.buffer import copied, rebuilt
from stretto.errors import OutOfTurn

WAKE_SECONDS = 0.1
"""How often a wait is interrupted so that Python can handle signals. PyTorch reports the death of a loader's worker by
a signal. It may arrive while the reading thread runs, but only the main thread can handle it. Also how long `close`
waits for a read to end in good order."""

CLOSED = "this pass over the loader is closed, by close() or because another iterator began"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """The result of one call of `next`."""

    batch: Any
    """The batch; None at the end."""
    has_ended: bool
    """Whether the data ended instead of a batch."""
    seconds: float
    """Duration of the call."""
    state: Any
    """State of the loader after the call; None for a loader without a state."""


class Reader(Protocol):
    """Reads one pass over a loader."""

    def now(self) -> float:
        """Return the time in seconds, on the clock by which batches are ready or late."""
        ...

    @property
    def is_closed(self) -> bool:
        """Whether the pass is over."""
        ...

    def is_ready(self) -> bool:
        """Return whether `take` would return without waiting."""
        ...

    def take(self) -> Fetched:
        """Return the next batch, and wait for it if necessary. After the end, return the end every time.

        Raises:
            OutOfTurn: The reader was closed.
            Exception: The loader raised it.
        """
        ...

    def close(self) -> None:
        """End the reader at once: a read in progress continues, and its batch is dropped."""
        ...

    def join(self) -> None:
        """Wait for the read that was in progress at `close`: two threads must not use one loader."""
        ...


@runtime_checkable
class BringsReader(Protocol):
    """An iterator over batches that provides a reader for its pass."""

    def open_reader(self, capture: Callable[[], Any], ahead: int) -> Reader:
        """Return the reader of this pass; see `ThreadReader` for the arguments."""
        ...


def open_reader(iterator: Iterator[Any], capture: Callable[[], Any], ahead: int) -> Reader:
    """Return a reader of `iterator`; see `ThreadReader` for the arguments."""
    if isinstance(iterator, BringsReader):
        return iterator.open_reader(capture, ahead)
    return ThreadReader(iterator, capture, ahead)


class ThreadReader(Reader):
    """Reads in the background, on its own thread.

    Args:
        iterator: Yields the batches of one pass.
        capture: Returns a copy of the loader's state; called after every read.
        ahead: Number of batches to read ahead. With 0 a batch is read on request, on the caller's thread.
    """

    def __init__(self, iterator: Iterator[Any], capture: Callable[[], Any], ahead: int) -> None:
        self._read: partial[Fetched | BaseException] | None = partial(fetch, iterator, capture)
        """Reads a batch. None once closed: it refers to the loader's workers, which should not outlive the pass."""
        self._ready: queue.SimpleQueue[Fetched | BaseException] = queue.SimpleQueue()
        """Batches that were read and not yet taken."""
        self._permits: queue.SimpleQueue[None] = queue.SimpleQueue()
        """One entry for every batch that may be read now."""
        self._has_read = threading.Event()
        """Set after every read, and when the thread ends."""
        self._last: Fetched | BaseException | None = None
        """The end of the data or an error, once taken: every later call returns it too."""
        self._thread: threading.Thread | None = None
        if ahead > 0:
            for _ in range(ahead):
                self._permits.put(None)
            self._thread = threading.Thread(
                target=self._run, args=(self._read,), name="stretto-reader", daemon=True
            )
            self._thread.start()

    def now(self) -> float:
        return time.perf_counter()

    @property
    def is_closed(self) -> bool:
        return self._read is None

    @property
    def has_thread(self) -> bool:
        """Whether batches are read on another thread than the caller's."""
        return self._thread is not None

    def is_ready(self) -> bool:
        return self._last is not None or not self._ready.empty()

    def take(self) -> Fetched:
        if self._read is None:
            raise OutOfTurn(CLOSED)
        outcome = self._read() if self._thread is None else self._wait()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def take_and_wait(self, seconds: float) -> Fetched:
        """Return `take()` once something has been read since the call; at the latest after `seconds` or the last
        read.
        """
        self._has_read.clear()
        fetched = self.take()
        if self._thread is not None and self._thread.is_alive():
            self._has_read.wait(seconds)
        return fetched

    def close(self) -> None:
        read, self._read = self._read, None
        if read is None:
            return
        while not self._ready.empty():
            self._ready.get()
        self._last = None
        self._permits.put(None)
        self._ready.put(OutOfTurn("this pass over the loader was closed while it waited for a batch"))
        # While the interpreter ends, daemon threads do not run any more; and garbage may be collected on the thread.
        if self._thread in (None, threading.current_thread()) or sys.is_finalizing():
            return
        end_workers(read.args[0])
        self._thread.join(WAKE_SECONDS)

    def join(self) -> None:
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(WAKE_SECONDS)

    def _wait(self) -> Fetched | BaseException:
        """Return the next result of the thread."""
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

    def _run(self, read: Callable[[], Fetched | BaseException]) -> None:
        """Read a batch for every permit; runs on the thread."""
        is_over = False
        while not is_over:
            self._permits.get()
            if self.is_closed:
                return
            outcome = read()
            is_over = is_last(outcome)
            if self.is_closed:
                return
            self._ready.put(outcome)
            self._has_read.set()


def fetch(iterator: Iterator[Any], capture: Callable[[], Any]) -> Fetched | BaseException:
    """Return the next batch, or the loader's exception, which `take` raises on the caller's thread."""
    started = time.perf_counter()
    try:
        batch = next(iterator, iterator)  # itself stands for the end, because None may be a batch
        state = capture()
        if batch is iterator:
            return Fetched(batch=None, has_ended=True, seconds=time.perf_counter() - started, state=state)
        if not isinstance(iterator, _MultiProcessingDataLoaderIter):
            batch = rebuilt(batch, copied)
        return Fetched(batch=batch, has_ended=False, seconds=time.perf_counter() - started, state=state)
    except BaseException as error:
        return error


def end_workers(iterator: Iterator[Any]) -> None:
    """End the workers of an abandoned pass, if it has some; a read that waits for them fails and ends too.

    PyTorch asks them to end, and terminates each after 5 s. This function does not wait for that. Persistent workers
    belong to their loader, which may be read again, so they stay.
    """
    if not isinstance(iterator, _MultiProcessingDataLoaderIter):
        return
    if not iterator._persistent_workers and not iterator._shutdown:
        threading.Thread(target=iterator._shutdown_workers, name="stretto-workers-end", daemon=True).start()
        results = iterator._worker_result_queue
        results.cancel_join_thread()  # a worker may be terminated while it holds the queue's lock
        results.put(None)  # what no read can take


def is_last(outcome: Fetched | BaseException) -> bool:
    """Return whether nothing follows `outcome`: it is the end of the data, or an error."""
    return isinstance(outcome, BaseException) or outcome.has_ended
