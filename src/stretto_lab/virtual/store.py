"""A store that is slow in virtual time: the duration of every read is given beforehand.

One read follows the other, as soon as there is room for its batch. With `ahead` batches of room:

    begun(k) = max(over(k - 1), taken(k - ahead))
    over(k)  = begun(k) + seconds(k)

A bare loop waits for each read. An `EchoLoader` reads ahead, as it does with any loader. `Ready` and `Auto` decide by
the virtual clock, so that equal runs decide alike.
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
    """Gives the batches of `loader`, each after its time; other attributes come from the loader.

        store = VirtualStore(loader, group, itertools.repeat(0.025))
        for batch in parallel.feed(EchoLoader(store, Ready())):
            ...

    Args:
        loader: This rank's batches, which take no time themselves.
        group: The group of the rank that reads and waits.
        durations: Seconds of one read after the other, without end; a later pass continues where the last one ended.
    """

    def __init__(self, loader: Iterable[Batch], group: VirtualGroup, durations: Iterable[float]) -> None:
        self.loader = loader
        self._group = group
        self._durations = iter(durations)

    def __len__(self) -> int:
        """Return the loader's length; TypeError where it has none."""
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
        """Return what an `EchoLoader` reads this pass with."""
        return VirtualReader(self, capture, ahead)

    def next_duration_ns(self) -> int:
        """Return how long the next read takes.

        Raises:
            ConfigError: There is no further finite duration.
        """
        seconds = next(self.durations, None)
        if seconds is None or not 0 <= seconds < float("inf"):
            raise ConfigError(f"a VirtualStore needs a finite duration of every read, found {seconds}")
        return round(seconds * 1e9)


class VirtualReader(Reader):
    """Reads ahead in virtual time, without a thread: the end of every read is known when it begins.

    Args:
        reads: The pass to read.
        capture: Returns the loader's state.
        ahead: Batches to have ready; with 0 they are read when asked for.
    """

    def __init__(self, reads: _Pass[Any], capture: Callable[[], Any], ahead: int) -> None:
        self._reads = reads
        self._capture = capture
        self._queue: deque[tuple[Fetched | BaseException, int]] = deque()
        """Batches that were read or are being read, each with the instant at which its read is over."""
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
        """No read is ever in progress: each is over in real time when it begins."""

    def _begin(self) -> None:
        """Begin the next read, unless nothing comes any more."""
        if self._queue and is_last(self._queue[-1][0]):
            return
        outcome = fetch(self._reads.batches, self._capture)
        begun_ns = max(self._over_ns, self._reads.group.now_ns)
        duration_ns = 0 if is_last(outcome) else self._reads.next_duration_ns()
        if isinstance(outcome, Fetched):
            outcome = dataclasses.replace(outcome, seconds=duration_ns / 1e9)
        self._over_ns = begun_ns + duration_ns
        self._queue.append((outcome, self._over_ns))
