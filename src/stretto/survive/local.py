"""Checkpoints in a folder of each machine, so that a restarted job need not read a shared disk.

If no rank can continue without the others, as under one torchrun, all processes are restarted after a loss. They
continue from a folder of each machine, usually in its memory: it has the same generations that `survives` keeps in
processes (`stretto.survive.generations`).
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
    """Checkpoints in a folder of each machine; another machine has a copy of each rank's share.

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
        folder: A folder on this machine: in its memory (`/dev/shm/...`), or on its own disk. One for each job. It holds
            two checkpoints, and three while one is written.
        every: Updates between two checkpoints; None lets the library choose, so that keeping them takes about a
            hundredth of the time.
        machine: The machine's name, equal on ranks that are lost at once; None uses the host's name, and the number of
            the agent under torchrun or srun.

    Raises:
        ConfigError: `folder` is not a path, `every` not a number of updates, or `machine` not a name.
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
        """Load the newest complete checkpoint of the machines into a new job; all ranks must call it, before training.

        Args:
            parallel: The new job.
            loader: This rank's loader. With as many ranks as before, Stretto restores its position; otherwise
                `Restored.loader_states` has the positions of all, for the caller to deal out.
            extra: As for `keep`; kept at the beginning of the job.
            begin: Called if there is no complete checkpoint: loads one from a shared disk, for example.
            at_least: Number of updates; an older checkpoint is not used, because `begin` has a newer one. Equal on all
                ranks.

        Returns:
            The restored state; None if there was none.

        Raises:
            TornCheckpoint: No checkpoint is complete, and there is no `begin`.
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
        """Keep a checkpoint, if it is due; all ranks must call it, after every `Update`.

        Where ranks step alone (`LocalSGD`, `DiLoCo` without a delay), it waits for the next average. The copies of the
        last one are sent meanwhile, and continue whenever this is called.

        Args:
            parallel: The job.
            loader: This rank's loader, if its position is to be kept.
            extra: Any value that `go_on` should return; rank 0's is kept. A function is called for it.

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
        """Remove the checkpoints after the end of the job, which frees the machines' memory."""
        self._memory.forget()
        self._folder.remove()
