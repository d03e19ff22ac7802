"""Where the ranks of a run come from: local processes, or ranks that a launcher has started."""

import copy
import dataclasses
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from stretto.errors import ConfigError, CorruptionError, WorkerFailed
from stretto_lab.train.configuration import RunConfig, TaskT
from stretto_lab.train.outcome import Outcome
from stretto_lab.train.quarantine import note_damage
from stretto_lab.train.rank import surviving_rank, train_rank
from stretto_lab.train.replaced import Damaged, run_replaced
from stretto_lab.train.workers import RankInfo, host_store, run_workers

T = TypeVar("T")

STEADY_AFTER = 3
"""First updates that the measured rate of a run skips: memory is new, and overlapping only begins."""


class Ranks(Protocol):
    """Ranks that can train any number of times, each time in new processes, so that peak memory is each run's own."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        ...

    @property
    def local_world_size(self) -> int:
        """How many of them share this machine's devices."""
        ...

    @property
    def is_first(self) -> bool:
        """Whether this process makes folders, writes results and prints them."""
        ...

    def without(self, ranks: Collection[int]) -> "Ranks | None":
        """Return all ranks but these, numbered again; None where this process did not start the others."""
        ...

    def call(self, function: Callable[..., T], *args: Any) -> list[T]:
        """Call `function(info, *args)` on every rank that this process starts and return their results.

        Args:
            function: Importable, like its arguments and result picklable.
            args: The same for every rank.

        Raises:
            WorkerFailed: A rank failed; names it and the cause.
        """
        ...


class LocalRanks:
    """Starts all ranks on this machine; this process hosts the store, so that the store outlives every rank.

    Args:
        workers: How many.
    """

    is_first = True

    def __init__(self, workers: int) -> None:
        self._devices = tuple(range(workers))
        self._workers = workers
        self._store = host_store("127.0.0.1", 0)
        self._runs = 0

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self._devices)

    @property
    def local_world_size(self) -> int:
        """How many there were at first: those that stay keep their devices."""
        return self._workers

    def without(self, ranks: Collection[int]) -> Self:
        """Return all ranks but these, numbered again; those that stay keep their devices."""
        remaining = copy.copy(self)
        remaining._devices = tuple(device for rank, device in enumerate(self._devices) if rank not in ranks)
        return remaining

    def call(self, function: Callable[..., T], *args: Any) -> list[T]:
        """Call `function(info, *args)` in one new process per rank; see `Ranks.call`."""
        return run_workers(function, self._infos(), *args)

    def _infos(self) -> list[RankInfo]:
        self._runs += 1
        return [
            RankInfo(
                rank=rank,
                world_size=self.world_size,
                local_rank=device,
                local_world_size=self._workers,
                host="127.0.0.1",
                port=self._store.port,
                store_prefix=str(self._runs),
            )
            for rank, device in enumerate(self._devices)
        ]

    def call_replaced(
        self,
        function: Callable[..., T],
        restarts: int,
        log: Callable[[str], None],
        damaged: Damaged,
        *args: Any,
    ) -> list[T]:
        """As `call`, with a new process for each that dies; see `run_replaced` for the arguments."""
        return run_replaced(function, self._infos(), restarts, log, damaged, *args)


class JoinedRank:
    """This process is one of the ranks that a launcher has started.

    Args:
        info: Which rank it is.
        hosts_store: Whether it opens the store; otherwise another process does.
    """

    def __init__(self, info: RankInfo, *, hosts_store: bool) -> None:
        self._info = info
        self._store = host_store(info.host, info.port) if hosts_store else None
        self._runs = 0

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._info.world_size

    @property
    def local_world_size(self) -> int:
        """How many of them share this machine's devices."""
        return self._info.local_world_size

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self._info.rank == 0

    def without(self, ranks: Collection[int]) -> None:
        """Return None: the launcher has started the others."""

    def call(self, function: Callable[..., T], *args: Any) -> list[T]:
        """Call `function(info, *args)` in a new process of this rank; see `Ranks.call`."""
        self._runs += 1
        infos = [dataclasses.replace(self._info, store_prefix=str(self._runs))]
        return run_workers(function, infos, *args)


def train(
    ranks: Ranks,
    run: RunConfig[TaskT],
    warmup_updates: int = STEADY_AFTER,
    *,
    shows_progress: bool,
    is_passing: bool = False,
) -> Outcome:
    """Train on `ranks` and return the outcome of the first rank that this process has started.

    Args:
        ranks: All ranks of the run.
        run: What to train.
        warmup_updates: First updates that the outcome's rate skips.
        shows_progress: Whether rank 0 shows the run as it goes.
        is_passing: Whether it is one of many, of which nothing stays on the screen.

    Raises:
        WorkerFailed: A rank failed; names it and the cause.
    """
    if run.survive:
        if not isinstance(ranks, LocalRanks):
            raise ConfigError(
                "--survive starts local workers and replaces them: expected no launcher; in your own loop "
                "call stretto.survives (the page survive)"
            )

        def damaged(worker: int, error: CorruptionError, others: int) -> None:
            if run.run_dir is not None:
                note_damage(
                    Path(run.run_dir),
                    f"worker {worker}: {error}",
                    [error],
                    world_size=others + 1,
                    left_out=[worker],
                    goes_on_with=others,
                    begins_at="memory",
                )

        outcomes = ranks.call_replaced(
            surviving_rank, run.restarts, _say, damaged, run, warmup_updates, shows_progress
        )
        for outcome in outcomes:
            if isinstance(outcome, Outcome):  # others have left
                return outcome
        raise WorkerFailed(
            "no worker reached the end: the last workers were no whole node; resume from the last checkpoint "
            "with stretto resume"
        )
    return ranks.call(train_rank, run, warmup_updates, shows_progress, is_passing)[0]


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
