"""Local workers that are replaced: one dies, the others continue, and a new process replaces it."""

import dataclasses
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any, TypeVar

from stretto.errors import CorruptionError, WorkerFailed
from stretto_lab.patience import waiting
from stretto_lab.train.processes import Worker, Workers, supervised
from stretto_lab.train.workers import RankInfo, announce, work

T = TypeVar("T")
Damaged = Callable[[int, CorruptionError, int], None]
"""Called with a worker's number, its error, and the number of workers that continue."""


def run_replaced(
    function: Callable[..., T],
    infos: Sequence[RankInfo],
    restarts: int,
    log: Callable[[str], None],
    damaged: Damaged,
    *args: Any,
) -> list[T]:
    """Call `function(info, *args)` in one process per info, and again in a new process for each that dies.

    Args:
        function: Importable, like its arguments and result picklable. The ranks in it have to survive a loss.
        infos: All ranks, on this machine.
        restarts: How many processes are started in the places of others.
        log: Called with one line of text at every death.
        damaged: Called when a worker is excluded because of damage.
        args: The same for every rank.

    Returns:
        The results of the workers that have lived to the end, in the order in which they were started.

    Raises:
        WorkerFailed: One has raised an error, and it was not that guards have named it alone; or none remains. All
            other processes have ended too.
    """
    with supervised(lands=True) as workers:
        replaced = _Replaced(workers, function, infos, restarts, log, damaged, args)
        workers.let_land()
        return replaced.results()


@dataclasses.dataclass(frozen=True, slots=True)
class Left:
    """The result of a function on a worker without which the others continue."""

    why: str


class _Replaced:
    """The workers of one run."""

    def __init__(
        self,
        workers: Workers,
        function: Callable[..., Any],
        infos: Sequence[RankInfo],
        restarts: int,
        log: Callable[[str], None],
        damaged: Damaged,
        args: tuple[Any, ...],
    ) -> None:
        self._workers, self._function, self._args = workers, function, args
        self._restarts, self._log, self._damaged = restarts, log, damaged
        self._seats = 0
        self._running: dict[int, tuple[RankInfo, Worker]] = {}
        self._results: dict[int, Any] = {}
        with waiting("starting the workers"):
            for info in infos:
                self._start(info)

    def results(self) -> list[Any]:
        """Wait for all."""
        while self._running:
            pipes = {worker.pipe: seat for seat, (_, worker) in self._running.items()}
            for pipe in wait(list(pipes)):
                self._take(pipes[pipe])  # type: ignore[index]  # what was waited for
        return [result for _, result in sorted(self._results.items())]

    def _start(self, info: RankInfo) -> None:
        info = dataclasses.replace(info, seat=self._seats)
        self._running[self._seats] = info, self._workers.start(work, self._function, info, self._args)
        self._seats += 1

    def _take(self, seat: int) -> None:
        info, worker = self._running.pop(seat)
        try:
            succeeded, report = worker.receive()
        except WorkerFailed as death:
            announce(info, str(death))
            if not self._running:
                raise
            self._lose(seat, info, str(death))
            return
        if not succeeded and report.damage and self._running:
            self._log(f"worker {seat} is removed ({report.text}): {len(self._running)} continue")
            self._damaged(seat, report.damage, len(self._running))
        elif not succeeded:
            raise WorkerFailed(
                f"worker {seat} failed: {report.text}", [report.damage] if report.damage else []
            )
        elif isinstance(report, Left):
            self._lose(seat, info, report.why)
        else:
            self._results[seat] = report

    def _lose(self, seat: int, info: RankInfo, why: str) -> None:
        """Start a worker to replace a lost worker, if restarts remain and no signal has come."""
        if self._workers.stop_signal is not None:
            return
        replaces = self._restarts > 0
        what = f"worker {self._seats} replaces it" if replaces else "no further worker is started"
        self._log(f"worker {seat} is lost ({why}): {len(self._running)} continue; {what}")
        if replaces:
            self._restarts -= 1
            self._start(info)
