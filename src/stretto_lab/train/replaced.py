"""Local workers that are replaced: if one dies, the others continue, and a new process replaces it."""

import dataclasses
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any, TypeVar

from stretto.errors import CorruptionError, WorkerFailed
from stretto_lab.patience import waiting
from stretto_lab.train.processes import Worker, supervised
from stretto_lab.train.workers import RankInfo, announce, work

T = TypeVar("T")
Damaged = Callable[[int, CorruptionError, int], None]
"""Called with a worker's number, its error, and the number of workers that continue."""


@dataclasses.dataclass(frozen=True, slots=True)
class Left:
    """The result of an excluded worker."""

    why: str


def run_replaced(
    function: Callable[..., T],
    infos: Sequence[RankInfo],
    restarts: int,
    log: Callable[[str], None],
    damaged: Damaged,
    *args: Any,
) -> list[T]:
    """Call `function(info, *args)` in one process per info, and in a new process for each that dies.

    Args:
        function: Importable, as are its arguments; the result is picklable. Its ranks must survive a loss.
        infos: All ranks, on this machine.
        restarts: Most replacements.
        log: Called with one line of text at every death.
        damaged: Called when a worker is excluded because of damage.
        args: The same for every rank.

    Returns:
        The results of the workers that reached the end, in the order of their start.

    Raises:
        WorkerFailed: A worker has raised an error other than damage that guards attribute to it alone; or no worker
            remains. All other processes have ended too.
    """
    running: dict[int, tuple[RankInfo, Worker]] = {}
    results: dict[int, T] = {}
    with supervised() as workers:

        def start(info: RankInfo, seat: int) -> None:
            info = dataclasses.replace(info, seat=seat)
            running[seat] = info, workers.start(work, function, info, args)

        with waiting("starting the workers"):
            for seat, info in enumerate(infos):
                start(info, seat)
        workers.are_started()
        free, last = len(infos), len(infos) + restarts
        while running:
            ready = wait([worker.pipe for _, worker in running.values()])
            for seat in [seat for seat, (_, worker) in running.items() if worker.pipe in ready]:
                info, worker = running.pop(seat)
                try:
                    succeeded, report = worker.receive()
                except WorkerFailed as death:
                    announce(info, str(death))
                    if not running:
                        raise
                    succeeded, report = True, Left(str(death))
                if not succeeded and report.damage and running:
                    log(f"worker {seat} is removed ({report.text}): {len(running)} continue")
                    damaged(seat, report.damage, len(running))
                elif not succeeded:
                    damages = [report.damage] if report.damage else []
                    raise WorkerFailed(f"worker {seat} failed: {report.text}", damages)
                elif not isinstance(report, Left):
                    results[seat] = report
                elif workers.stop_signal is None:  # nobody has asked the command to end
                    what = f"worker {free} replaces it" if free < last else "no further worker is started"
                    log(f"worker {seat} is lost ({report.why}): {len(running)} continue; {what}")
                    if free < last:
                        start(info, free)
                        free += 1
    return [result for _, result in sorted(results.items())]
