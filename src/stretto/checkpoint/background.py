"""Saves that write their files during training.

Note [At updates]
    A background thread writes and renames; it never communicates, because collectives of two threads could meet in
    another order on another rank. A rank reports the end of its step of the save in its round report, which it sends
    anyway. Once all have reported it, they gather the results after that update, and the next step begins. So all
    learn of the end, or of a failure, at the same update, and an update in between has no collective more.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from stretto.checkpoint.ranks import Ranks, check_job
from stretto.engine.on_device import choose_runtime
from stretto.engine.report import Asks
from stretto.engine.round import Listener
from stretto.errors import CheckpointError
from stretto.parallel import DataParallel
from stretto.records import Incident

Step = tuple[str, Callable[[list[Any]], Any]]
"""A step of a save that every rank takes: its name in messages, and work that is called on rank 0 with all ranks'
results of the step before; it returns plain JSON, and does not communicate."""


class BackgroundSave(Listener):
    """A save in progress; see Note [At updates].

    Args:
        parallel: The job.
        ranks: Its ranks.
        steps: The remaining work, on all ranks alike.
        abandon: Removes the written files after a failure.
    """

    def __init__(
        self, parallel: DataParallel, ranks: Ranks, steps: Sequence[Step], abandon: Callable[[], None]
    ) -> None:
        self._course = parallel.job.compute.rounds
        self._ranks = ranks
        self._abandon = abandon
        self._left = list(steps)
        self._failure: CheckpointError | None = None
        # On a virtual cluster a lane in virtual time, so that runs repeat.
        self._runtime = choose_runtime(parallel.job.everyone.group, torch.device("cpu"), overlaps=True)
        self._begin([])

    def round_closed(self) -> None:
        """Report in this round whether this rank has taken its step."""
        if self._left and self._working.done():
            self._course.asks |= Asks.SAVED

    def update_committed(self) -> None:
        """Begin the next step, if all ranks have taken the last one."""
        if self._left and Asks.SAVED in self._course.asked:
            self._end_step()

    def ended(self) -> Sequence[Incident]:
        """Wait for the end of the save at the end of the job.

        Raises:
            CheckpointError: It failed.
        """
        self.complete()
        self.check()
        return ()

    def complete(self) -> None:
        """Wait for the end of the save; all ranks must call it."""
        while self._left:
            self._end_step()

    def check(self) -> bool:
        """Return whether it is in progress; raise its error once if it has failed."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return bool(self._left)

    def _begin(self, outcomes: list[Any]) -> None:
        _, work = self._left[0]
        self._working = self._runtime.spawn(partial(work, outcomes))

    def _end_step(self) -> None:
        self._course.asks &= ~Asks.SAVED
        try:
            outcomes = self._ranks.collect(self._left.pop(0)[0], self._working.result)
        except CheckpointError as error:
            self._failure = error
            self._left.clear()
            self._abandon()
        if self._left:
            self._begin(outcomes)
        else:
            self._runtime.join()


def wait(parallel: DataParallel) -> None:
    """Wait for the save in the background, if there is one; all ranks must call it, right after an `Update`.

    Args:
        parallel: The job.

    Raises:
        OutOfTurn: An update is in progress.
        CheckpointError: The save has failed; the job can continue.
        CommunicationError: A rank died, raised or fell silent.
    """
    check_job(parallel)
    listeners = parallel.job.model.listeners
    for one in [one for one in listeners if isinstance(one, BackgroundSave)]:
        with parallel.between_updates("a checkpoint"):
            one.complete()
        listeners.remove(one)
        one.check()


def check(parallel: DataParallel) -> bool:
    """Return whether a save is in progress in the background, without waiting or communicating.

    Ranks learn of an end or a failure at the same update, so calls right after that update return alike.

    Args:
        parallel: The job.

    Raises:
        CheckpointError: The last save failed, and no call has raised its error yet; the job can continue.
    """
    check_job(parallel)
    saves = [one for one in parallel.job.model.listeners if isinstance(one, BackgroundSave)]
    return any([one.check() for one in saves])
