"""The ranks of a run: local processes, or ranks that a launcher has started."""

import copy
import dataclasses
import itertools
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from stretto.errors import ConfigError, CorruptionError, WorkerFailed
from stretto_lab.train.configuration import RunConfig, TaskT
from stretto_lab.train.outcome import Outcome
from stretto_lab.train.quarantine import note_damage
from stretto_lab.train.rank import surviving_rank, train_rank
from stretto_lab.train.replaced import run_replaced
from stretto_lab.train.workers import RankInfo, host_store, run_workers

T = TypeVar("T")

STEADY_AFTER = 3
"""Number of first updates that a run's rate skips: memory is new, and overlap only begins."""


class Ranks:
    """Ranks that train any number of times, each time in new processes, so that each run measures its own peak memory.

    Args:
        infos: The ranks that this process starts; a launcher may have started others.
        hosts_store: Whether this process opens the store; otherwise another process does.
    """

    def __init__(self, infos: Sequence[RankInfo], *, hosts_store: bool) -> None:
        self._infos = infos
        if hosts_store:  # for as long as this object lives, so that the store outlives every rank
            self._store = host_store(infos[0].host, infos[0].port)
            self._infos = [dataclasses.replace(info, port=self._store.port) for info in infos]
        self._runs = itertools.count(1)

    @classmethod
    def local(cls, workers: int) -> Self:
        infos = [
            RankInfo(
                rank=rank,
                world_size=workers,
                local_rank=rank,
                local_world_size=workers,
                host="127.0.0.1",
                port=0,
            )
            for rank in range(workers)
        ]
        return cls(infos, hosts_store=True)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._infos[0].world_size

    @property
    def local_world_size(self) -> int:
        """Number of ranks that share this machine's devices, before any rank was excluded."""
        return self._infos[0].local_world_size

    @property
    def is_first(self) -> bool:
        """Whether this process makes folders, and writes and prints results."""
        return self._infos[0].rank == 0

    @property
    def are_local(self) -> bool:
        """Whether this process starts all ranks."""
        return len(self._infos) == self.world_size

    def without(self, ranks: Collection[int]) -> Self | None:
        """Return the other ranks with new numbers, each on its device; None if a launcher has started them."""
        if not self.are_local:
            return None
        remaining, kept = copy.copy(self), [info for info in self._infos if info.rank not in ranks]
        remaining._infos = [
            dataclasses.replace(info, rank=rank, world_size=len(kept)) for rank, info in enumerate(kept)
        ]
        return remaining

    def of_next_run(self) -> list[RankInfo]:
        """Return the ranks with a prefix for keys in the store that no other run uses."""
        prefix = str(next(self._runs))
        return [dataclasses.replace(info, store_prefix=prefix) for info in self._infos]

    def call(self, function: Callable[..., T], *args: Any) -> list[T]:
        """Call `function(info, *args)` in a new process for each rank, and return their results.

        Args:
            function: Importable, like its arguments and result picklable.
            args: The same for every rank.

        Raises:
            WorkerFailed: A rank failed; names it and the cause.
        """
        return run_workers(function, self.of_next_run(), *args)


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
        run: The run.
        warmup_updates: Number of first updates that the outcome's rate skips.
        shows_progress: Whether rank 0 shows the progress.
        is_passing: Whether it is one of many runs, whose lines are erased.

    Raises:
        WorkerFailed: A rank failed; names it and the cause.
    """
    if run.survive:
        if not ranks.are_local:
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

        outcomes = run_replaced(
            surviving_rank,
            ranks.of_next_run(),
            run.restarts,
            _say,
            damaged,
            run,
            warmup_updates,
            shows_progress,
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
