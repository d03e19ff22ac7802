"""A store that is slow in virtual time, with given durations for its reads.

Reads follow each other, as soon as there is room for a batch. With `ahead` batches of room:

    begun(k) = max(over(k - 1), taken(k - ahead))
    over(k)   = begun(k) + seconds(k)

A bare loop waits for each read. An `EchoLoader` reads ahead, as it does with any loader. `Ready` and `Auto` decide by
the virtual clock, so equal runs decide alike.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from stretto.echo.reader import CLOSED, Fetched, Reader, fetch, is_last
from stretto.errors import ConfigError, OutOfTurn
from stretto_lab.virtual.group import VirtualGroup

Batch = TypeVar("Batch")


class VirtualStore(Generic[Batch]):
    """Returns the batches of `loader`, each after its duration; other attributes are the loader's.

        store = VirtualStore(loader, group, itertools.repeat(0.025))
        for batch in parallel.feed(EchoLoader(store, Ready())):
            ...

    Args:
        loader: This rank's batches, which themselves take no virtual time.
        group: The group of the rank that reads and waits.
        durations: Seconds of each read, without end; a later pass continues with the next duration.
    """

    def __init__(self, loader: Iterable[Batch], group: VirtualGroup, durations: Iterable[float]) -> None:
        self.loader = loader
        self._group = group
        self._durations = iter(durations)

    def __len__(self) -> int:
        """Return the loader's length; raise TypeError if it has none."""
        loader: Any = self.loader
        return len(loader)

    def __iter__(self) -> Iterator[Batch]:
        return _Pass(iter(self.loader), self._group, self._durations)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":  # not made yet, as when it is being unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)


@dataclasses.dataclass(frozen=True, slots=True)
class _Pass(Iterator[Batch]):
    """One pass over a store, for a bare loop (`__next__`) or an `EchoLoader` (`open_reader`)."""

    batches: Iterator[Batch]
    group: VirtualGroup
    durations: Iterator[float]

    def __next__(self) -> Batch:
        batch = next(self.batches)
        self.group.wait_until(self.group.now_ns + self.next_duration_ns())
        return batch

    def open_reader(self, capture: Callable[[], Any], ahead: int) -> Reader:
        """Return the reader of this pass for an `EchoLoader`."""
        return VirtualReader(self, capture, ahead)

    def next_duration_ns(self) -> int:
        """Return the duration of the next read.

        Raises:
            ConfigError: There is no further finite duration.
        """
        seconds = next(self.durations, None)
        if seconds is None or not 0 <= seconds < float("inf"):
            raise ConfigError(f"a VirtualStore needs a finite duration of every read, found {seconds}")
        return round(seconds * 1e9)


class VirtualReader(Reader):
    """Reads ahead in virtual time, without a thread: the end of every read is known at its start.

    Args:
        reads: The pass to read.
        capture: Returns the loader's state.
        ahead: Number of batches to read ahead; with 0 each is read on request.
    """

    def __init__(self, reads: _Pass[Any], capture: Callable[[], Any], ahead: int) -> None:
        self._reads = reads
        self._capture = capture
        self._queue: deque[tuple[Fetched | BaseException, int]] = deque()
        """Batches that were read or are being read, each with the end time of its read."""
        self._over_ns = 0
        self._is_closed = False
        self._reads_ahead = ahead > 0
        for _ in range(ahead):
            self._begin()

    def now(self) -> float:
        """Return virtual seconds since the run began."""
        return self._reads.group.now_ns / 1e9

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def is_ready(self) -> bool:
        return bool(self._queue) and self._queue[0][1] <= self._reads.group.now_ns

    def take(self) -> Fetched:
        if self.is_closed:
            raise OutOfTurn(CLOSED)
        if not self._queue:
            self._begin()
        outcome, over_ns = self._queue[0]
        self._reads.group.wait_until(over_ns)
        if isinstance(outcome, BaseException):
            raise outcome
        if not outcome.has_ended:  # the end stays: it is the answer to every later call too
            self._queue.popleft()
            if self._reads_ahead:
                self._begin()
        return outcome

    def close(self) -> None:
        self._is_closed = True

    def join(self) -> None:
        """Do nothing: in real time every read is complete as soon as it begins."""

    def _begin(self) -> None:
        """Begin the next read, unless the data have ended."""
        if self._queue and is_last(self._queue[-1][0]):
            return
        outcome = fetch(self._reads.batches, self._capture)
        begun_ns = max(self._over_ns, self._reads.group.now_ns)
        duration_ns = 0 if is_last(outcome) else self._reads.next_duration_ns()
        if isinstance(outcome, Fetched):
            outcome = dataclasses.replace(outcome, seconds=duration_ns / 1e9)
        self._over_ns = begun_ns + duration_ns
        self._queue.append((outcome, self._over_ns))
