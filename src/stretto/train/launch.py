"""Where the ranks of a run come from: local processes, or ranks that a launcher has started."""

import copy
import dataclasses
from collections.abc import Callable, Collection
from typing import Any, Protocol, Self, TypeVar

from stretto.train.configuration import RunConfig, TaskT
from stretto.train.outcome import Outcome
from stretto.train.rank import train_rank
from stretto.train.workers import Seat, host_store, run_workers

T = TypeVar("T")

STEADY_AFTER = 3
"""First updates that the rate of a run leaves out: memory is new to them, and overlapping begins."""


class Ranks(Protocol):
    """Ranks that can run, again and again; each time in fresh processes, so that memory is measured apart."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for the job: prepares folders, writes results."""
        ...

    def without(self, ranks: Collection[int]) -> "Ranks | None":
        """Return all but some of the ranks, numbered anew; None where it is not for this process to say."""
        ...

    def call(self, function: Callable[..., T], *args: Any) -> list[T]:
        """Call `function(seat, *args)` on every rank that this process starts and return their results.

        Args:
            function: Importable, like its arguments and result picklable.
            args: For every rank alike.

        Raises:
            WorkerFailed: A rank failed; names it and the cause.
        """
        ...

    def train(self, run: RunConfig[TaskT], warmup_updates: int = ..., *, shows_progress: bool) -> Outcome:
        """Run `run` and return the outcome of the first rank that this process has started.

        Args:
            run: What to do.
            warmup_updates: First updates that the outcome's rate leaves out.
            shows_progress: Whether rank 0 shows the run as it goes.

        Raises:
            WorkerFailed: A rank failed; names it and the cause.
        """
        ...


class LocalRanks:
    """All ranks are processes of this machine; this process hosts the store, so that it outlives every rank.

    Args:
        workers: How many.
    """

    is_first = True

    def __init__(self, workers: int) -> None:
        self._places = tuple(range(workers))
        self._workers = workers
        self._store = host_store("127.0.0.1", 0)
        self._runs = 0

    @property
    def world_size(self) -> int:
        """See `Ranks.world_size`."""
        return len(self._places)

    def without(self, ranks: Collection[int]) -> Self:
        """See `Ranks.without`; those that stay keep their devices."""
        remaining = copy.copy(self)
        remaining._places = tuple(place for rank, place in enumerate(self._places) if rank not in ranks)
        return remaining

    def call(self, function: Callable[..., T], *args: Any) -> list[T]:
        """See `Ranks.call`."""
        self._runs += 1
        seats = [
            Seat(
                rank=rank,
                world_size=self.world_size,
                local_rank=place,
                local_world_size=self._workers,
                host="127.0.0.1",
                port=self._store.port,
                room=str(self._runs),
            )
            for rank, place in enumerate(self._places)
        ]
        return run_workers(function, seats, *args)

    def train(
        self, run: RunConfig[TaskT], warmup_updates: int = STEADY_AFTER, *, shows_progress: bool
    ) -> Outcome:
        """See `Ranks.train`."""
        return self.call(train_rank, run, warmup_updates, shows_progress)[0]


class JoinedRank:
    """This process is one of the ranks that a launcher has started.

    Args:
        seat: Its place.
        hosts_store: Whether it opens the store; otherwise somebody else has.
    """

    def __init__(self, seat: Seat, *, hosts_store: bool) -> None:
        self._seat = seat
        self._store = host_store(seat.host, seat.port) if hosts_store else None
        self._runs = 0

    @property
    def world_size(self) -> int:
        """See `Ranks.world_size`."""
        return self._seat.world_size

    @property
    def is_first(self) -> bool:
        """See `Ranks.is_first`."""
        return self._seat.rank == 0

    def without(self, ranks: Collection[int]) -> None:
        """See `Ranks.without`: the launcher has started the others."""

    def call(self, function: Callable[..., T], *args: Any) -> list[T]:
        """See `Ranks.call`."""
        self._runs += 1
        seats = [dataclasses.replace(self._seat, room=str(self._runs))]
        return run_workers(function, seats, *args)

    def train(
        self, run: RunConfig[TaskT], warmup_updates: int = STEADY_AFTER, *, shows_progress: bool
    ) -> Outcome:
        """See `Ranks.train`."""
        return self.call(train_rank, run, warmup_updates, shows_progress)[0]
