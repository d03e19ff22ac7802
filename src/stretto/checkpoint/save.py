"""Writes a checkpoint in steps that all ranks take together; the long ones may be taken during training."""

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from stretto.checkpoint import files as folder
from stretto.checkpoint.background import BackgroundSave, Step, wait
from stretto.checkpoint.load import check_loads
from stretto.checkpoint.manifest import Manifest, share_of
from stretto.checkpoint.ranks import Ranks, check_job
from stretto.continuation import Loader, check_loader
from stretto.dealing import check_model, models
from stretto.disk import folder_of, mapped, new_file, writing_to
from stretto.errors import CheckpointError, ConfigError, TornCheckpoint
from stretto.fields import is_count, shown
from stretto.parallel import DataParallel
from stretto.share import Held, hold, kinds_of, read_share


def save(
    parallel: DataParallel,
    directory: str | os.PathLike[str],
    *,
    loader: Loader | None = None,
    extra: Any = None,
    keep: int = 3,
    async_save: bool = False,
) -> Path:
    """Write a checkpoint into `directory`, and remove old ones; all ranks must call, right after an `Update`.

    It can also be called before training, or after `finish`. Saving does not change the running job. Every rank writes
    its share; `directory` must be on a file system that all ranks share. The checkpoint appears under its name in one
    moment, after all ranks have written. A crash before that leaves the earlier checkpoints as they were.

    Args:
        parallel: The job.
        directory: Holds the checkpoints of one run, and is made if need be.
        loader: This rank's, if its position is to be saved: its `state_dict()`, or, if it has none, the number of
            batches that `feed` gave out.
        extra: Numbers, text, containers, tensors, for example a scheduler's state; rank 0's is saved. Any other class
            has to be named with `torch.serialization.add_safe_globals`.
        keep: How many checkpoints stay, the last ones; at least 1.
        async_save: Return once this rank's share is copied, and write it during training. The checkpoint appears at a
            later update; the next `save`, `load`, `wait`, `check` or `finish` raises its error. The first four wait
            for it. After `finish` training has ended, so `save` waits.

    Returns:
        The checkpoint's own folder.

    Raises:
        OutOfTurn: An update is in progress.
        CheckpointError: Some rank cannot write, or could not in the background, or this job could not load what it
            saves, which is tried at its first checkpoint; the job can continue.
        CommunicationError: A rank died, raised or fell silent.
    """
    check_job(parallel)
    if not is_count(keep, 1):
        raise ConfigError(f"keep={shown(keep)}: expected at least 1, the checkpoint that is being written")
    if not isinstance(async_save, bool):
        raise ConfigError(f"async_save={shown(async_save)}: expected True or False")
    home = folder_of(directory, "directory")
    check_loader(loader)
    wait(parallel)
    with parallel.between_updates("a checkpoint"):
        continuation = parallel.continuation()
        state = continuation.write()
    ranks = Ranks(parallel)

    writing = _Writing(parallel, keep, in_background=async_save)

    def begin() -> str:
        writing.held = hold(continuation, parallel.strategy.name, state, loader, extra, copies=False)
        with writing_to(home):
            if ranks.rank:
                return ""
            name = folder.begin(home, parallel.steps)
            if not parallel.job.num_checkpoints:
                folder.say_doubts(home)
            return name

    writing.path = home / ranks.first("beginning a checkpoint", begin)
    try:
        if not parallel.job.num_checkpoints:
            with parallel.between_updates("a checkpoint"):
                blank = continuation.blank((), 0, same_strategy=False, same_layout=False)
            ranks.agree(
                "planning to load the checkpoint that is being saved",
                lambda: check_model(models(kinds_of(writing.held.entries)), kinds_of(blank["model"])),
            )
        ranks.agree("packing a checkpoint", writing.pack)
        parallel.job.count_checkpoint()
        # Once more, now that digests are taken: a value that changes from here on differs from its digest.
        with parallel.between_updates("a checkpoint"):
            for listener in parallel.job.model.listeners:
                listener.committed_is_read()
        if writing.in_background:
            beside = BackgroundSave(parallel, ranks, writing.steps(), writing.abandon)
            parallel.job.model.listeners.append(beside)
            return writing.path
        outcomes: list[Any] = []
        for doing, work in writing.steps():
            outcomes = ranks.collect(doing, partial(work, outcomes))
    except CheckpointError:
        writing.abandon()
        raise
    return writing.path


class _Writing:
    """One rank's part in writing: its share, and on rank 0 the manifest."""

    held: Held
    """What this rank has of the job, until it is packed."""
    path: Path
    """Where the checkpoint appears."""

    def __init__(self, parallel: DataParallel, keep: int, *, in_background: bool) -> None:
        self._keep = keep
        self._parallel = parallel
        self._rank = parallel.rank
        self.in_background = in_background and not parallel.job.compute.lifetime.has_finished

    @property
    def _folder(self) -> Path:
        return folder.writing(self.path.parent, self.path.name)

    def pack(self) -> None:
        """Take the digests of this rank's share; copy it, where training continues before it is written.

        Raises:
            CheckpointError: A fresh model would not load it.
        """
        user = self._parallel.job.model
        check_loads(user.model, user.first_buffers, models(kinds_of(self.held.entries)))
        written = self.held.written()
        self._digest = written.digest
        self._chunks = iter([written.joined()]) if self.in_background else written.chunks()
        del self.held

    def steps(self) -> tuple[Step, ...]:
        """Return what takes time, and touches neither the job nor its group."""
        return ("writing a checkpoint", self._write), ("committing a checkpoint", self._commit)

    def abandon(self) -> None:
        """Remove the written files."""
        self._chunks = iter(())
        if self._rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _write(self, _: list[Any]) -> tuple[int, str]:
        """Write this rank's share, and compare the file with the job's state."""
        if not self._folder.is_dir():
            raise CheckpointError(
                f"rank 0 has made {self._folder}, and this rank does not find it: expected a file system that "
                "all ranks share"
            )
        path = share_of(self._folder, self._rank)
        with writing_to(path):
            with new_file(path) as stream:
                for chunk in self._chunks:
                    stream.write(chunk)
                stream.flush()
                os.fsync(stream.fileno())
            content = mapped(path)
        try:
            read_share(content, str(path), self._digest)
        except TornCheckpoint as error:
            raise CheckpointError(
                f"a value changed between the job and the file: {error}; save again, and test the memory of this rank"
            ) from error
        return len(content), self._digest

    def _commit(self, shares: list[Any]) -> None:
        """Complete the checkpoint, on rank 0."""
        if self._rank != 0:
            return
        with writing_to(self._folder):
            Manifest(tuple((size, digest) for size, digest in shares)).write(self._folder)
            folder.commit(self.path.parent, self.path.name)
            folder.prune(self.path.parent, self._keep)
