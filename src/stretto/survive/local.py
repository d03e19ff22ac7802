"""Checkpoints that machines keep for themselves, so that a job that is started again need not read a shared disk.

Where no rank can continue without the others, as under one torchrun for all of them, a lost rank means that all
processes are started again. What they continue from is in a folder of each machine, in its memory as a rule: the
generations that `survives` keeps in processes (`stretto.survive.generations`), which are found and read in the same
way.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

from stretto.checkpoint.load import Restored
from stretto.checkpoint.ranks import check_job
from stretto.continuation import Loader
from stretto.disk import folder_of
from stretto.errors import ConfigError, OutOfTurn, TornCheckpoint
from stretto.fields import is_count, shown
from stretto.groups import own_machine
from stretto.parallel import DataParallel
from stretto.survive.folder import Folder
from stretto.survive.generations import Memory
from stretto.survive.keeping import Keeping, do_all_come

_log = logging.getLogger("stretto")


class LocalCheckpoints:
    """Checkpoints in a folder of each machine, a copy of each rank's share also on another.

        local = stretto.LocalCheckpoints("/dev/shm/my-job")
        local.go_on(parallel)
        with parallel:
            for batch in parallel.feed(loader, on_update=lambda update: local.keep(parallel)):
                parallel.backward(loss_function(model(batch)))
            parallel.finish()
        local.remove()

    The ranks that are started again continue from the newest one that they hold together, on as many ranks as there are
    then, if no two machines were lost at once that held each other's copies. Any launcher and any backend will do.

    Args:
        folder: On this machine: in its memory (`/dev/shm/...`), or on its own disk. One for each job. It holds
            two checkpoints, and three while one is written.
        every: Updates between two; None lets the library choose, so that keeping them takes about a hundredth of the
            time.
        machine: Its name, equal on ranks that are lost at once; None takes its host's, and the number of its agent
            under torchrun or srun.

    Raises:
        ConfigError: `folder` is no path, `every` no number of updates, or `machine` no name.
        CheckpointError: The folder cannot be made, or is a link, or others own it or can write there.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, every: int | None = None, machine: str | None = None
    ) -> None:
        if every is not None and not is_count(every, minimum=1):
            raise ConfigError(f"every={shown(every)}: expected a number of updates, from 1")
        if machine is not None and not (isinstance(machine, str) and machine):
            raise ConfigError(f"machine={shown(machine)}: expected its name, as a text")
        self._folder = Folder(folder_of(folder, "folder"))
        self._every = every
        self._memory = Memory(machine or own_machine(), is_first=True, folder=self._folder)
        self._keeping: Keeping | None = None

    def go_on(
        self,
        parallel: DataParallel,
        *,
        loader: Loader | None = None,
        extra: Any = None,
        begin: Callable[[], object] | None = None,
        at_least: int = 0,
    ) -> Restored | None:
        """Let a new job continue from the newest whole checkpoint of its machines; all ranks must call, before
        training.

        Args:
            parallel: The new job.
            loader: This rank's. With as many ranks as before, Stretto restores its position; else
                `Restored.loader_states` has the positions of all, for the caller to deal out.
            extra: As for `keep`; kept at the beginning of the job.
            begin: Called where there is no checkpoint, and where none is whole: loads one from a shared disk, for
                example.
            at_least: Updates after which a checkpoint was taken: one that is older is of no use, because `begin` has a
                newer one. The same on all ranks.

        Returns:
            The restored state; None if there was none.

        Raises:
            TornCheckpoint: None is whole, and there is no `begin`.
            CheckpointError: The folder has no room.
            CommunicationError: A rank was lost.
        """
        check_job(parallel)
        keeping = Keeping(parallel, parallel.job.everyone.group, self._memory, self._every)
        try:
            restored = keeping.go_on(parallel, loader=loader, at_least=at_least)
        except TornCheckpoint as error:
            if begin is None:
                raise TornCheckpoint(f"{error}, with {self._folder.path} removed on all machines") from error
            if parallel.rank == 0:
                _log.warning("%s: %s; beginning without it", self._folder.path, error)
            self._memory.forget()
            restored = None
        if restored is None:
            keeping.begin(parallel, None, begin, loader=loader, extra=extra)
        elif parallel.rank == 0:
            _log.warning(
                "resuming from update %d on %d ranks, from %s on their machines",
                restored.step, parallel.world_size, self._folder.path,
            )  # fmt: skip
        self._keeping = keeping
        return restored

    def keep(self, parallel: DataParallel, *, loader: Loader | None = None, extra: Any = None) -> None:
        """Keep a checkpoint, if it is time to; all ranks must call, after every `Update`.

        Where ranks step alone (`LocalSGD`, `DiLoCo` without a delay), it waits for the next average. The copies of the
        last one are sent meanwhile, and continue whenever this is called.

        Args:
            parallel: The job.
            loader: This rank's, if its position is to be kept.
            extra: Anything that `go_on` returns; rank 0's is kept. A function is called for it.

        Raises:
            OutOfTurn: `go_on` was not called before.
            CheckpointError: The folder has no room.
            CommunicationError: A rank was lost.
        """
        if self._keeping is None:
            raise OutOfTurn(
                f"rank {parallel.rank}: LocalCheckpoints.keep() before go_on(): expected it before training"
            )
        if do_all_come(parallel) and self._keeping.is_due(parallel):
            self._keeping.keep(parallel, None, loader=loader, extra=extra)
        else:
            self._keeping.send_on()

    def remove(self) -> None:
        """Remove them: the job is done, and its machines have their memory back."""
        self._memory.forget()
        self._folder.remove()
