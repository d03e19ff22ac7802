"""Writes a checkpoint in steps that all ranks take together; the long ones may be taken beside training."""

import os
from pathlib import Path
from typing import Any

import xxhash
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from stretto.checkpoint import files as folder
from stretto.checkpoint.background import BackgroundSave, Step, wait
from stretto.checkpoint.manifest import METADATA, Manifest, Stored
from stretto.checkpoint.pieces import LoadPlanner, SavePlanner, Writer, entry_kinds
from stretto.checkpoint.plans import plan_as_json, plan_from_json
from stretto.checkpoint.ranks import Ranks, check_job
from stretto.continuation import Continuation, Loader, check_loader
from stretto.disk import folder_of, writing_to
from stretto.engine.state import State
from stretto.errors import CheckpointError, ConfigError
from stretto.fields import is_count, shown
from stretto.optimizer import name_of
from stretto.parallel import DataParallel


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
    its share; `directory` must lie on a file system that all ranks share. The checkpoint appears under its name in one
    moment, after all ranks have written. A crash before that leaves the earlier checkpoints as they were.

    Args:
        parallel: The job.
        directory: Holds the checkpoints of one run, and is made if need be.
        loader: This rank's, if its position is to be saved: `state_dict()`.
        extra: Numbers, text, containers, tensors, for example a scheduler's state; rank 0's is saved. Any other class
            has to be named with `torch.serialization.add_safe_globals`.
        keep: How many checkpoints stay, the last ones; at least 1.
        async_save: Return once what this rank writes is copied, and write it beside training. The checkpoint appears
            at a later update; the next `save`, `load`, `wait`, `check` or `finish` raises what it fails with. The
            first four wait for it. After `finish` there is nothing to write beside, and `save` waits.

    Returns:
        The checkpoint's own folder.

    Raises:
        OutOfTurn: An update is under way.
        CheckpointError: Some rank cannot write, or could not in the background, or this job could not load what it
            saves, which is tried at its first checkpoint; the job can go on.
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

    def begin() -> str:
        state.update(continuation.write_own(state, loader, extra))
        with writing_to(home):
            return folder.begin(home, parallel.steps) if ranks.rank == 0 else ""

    name = ranks.gather("beginning a checkpoint", begin)[0]
    writing = _Writing(parallel, home / name, keep, state)
    in_background = async_save and not parallel.job.compute.lifetime.has_finished
    try:
        plans = ranks.gather("planning a checkpoint", writing.plan)
        ranks.agree("dividing a checkpoint", lambda: writing.divide(plans, copies=in_background))
        if not parallel.job.num_checkpoints:
            _expect_to_load(parallel, continuation, ranks, writing.metadata)
        parallel.job.count_checkpoint()
        # Once more, now that digests are taken: a value that changes from here on differs from its digest.
        with parallel.between_updates("a checkpoint"):
            for listener in parallel.job.model.listeners:
                listener.committed_is_read()
        if in_background:
            group = parallel.job.everyone.group
            parallel.job.model.listeners.append(
                BackgroundSave(ranks, group, writing.steps(), writing.abandon)
            )
            return home / name
        outcomes: list[Any] = []
        for step in writing.steps():
            outcomes = ranks.gather(*step.after(outcomes))
    except CheckpointError:
        writing.abandon()
        raise
    return home / name


def _expect_to_load(
    parallel: DataParallel, continuation: Continuation, ranks: Ranks, metadata: Metadata
) -> None:
    """Plan to load what is about to be written into this job: nobody should learn after days that it cannot be."""
    with parallel.between_updates("a checkpoint"):
        blank = continuation.blank(
            entry_kinds(metadata).keys(), parallel.world_size, same_strategy=True, same_layout=True
        )
    ranks.agree(
        "planning to load the checkpoint that is being saved", lambda: LoadPlanner().plan(blank, metadata)
    )


class _Writing:
    """One rank's part in writing, by PyTorch's protocol of planners and writers."""

    def __init__(self, parallel: DataParallel, path: Path, keep: int, state: State) -> None:
        self._path = folder.writing(path.parent, path.name)
        self._final = path
        self._keep = keep
        self._parallel = parallel
        self._rank, self._step = parallel.rank, parallel.steps
        self._state = state
        self._planner = SavePlanner()
        self._writer = Writer(self._path)

    def plan(self) -> dict[str, Any]:
        """Return what this rank would write, and take the digests of it."""
        if not self._path.is_dir():
            raise CheckpointError(
                f"{self._path}, made by rank 0, is not there: expected a file system that all share"
            )
        self._planner.set_up_planner(self._state, self._writer.storage_meta(), self._rank == 0)
        self._writer.set_up_storage_writer(self._rank == 0)
        plan = self._writer.prepare_local_plan(self._planner.create_local_plan())
        self._writer.hold(plan, self._planner)
        self._state.clear()  # the planner holds the entries, each until it is packed or written
        return plan_as_json(plan)

    def divide(self, plans: list[Any], *, copies: bool) -> None:
        """Choose this rank's share of what all ranks would write, the same on each; and copy it, if asked to."""
        shares, self.metadata = self._planner.create_global_plan([plan_from_json(plan) for plan in plans])
        share: SavePlan = self._writer.prepare_global_plan(shares)[self._rank]
        self._share = self._planner.finish_plan(share)
        if copies:
            self._planner.copy(self._share)

    def steps(self) -> tuple[Step, ...]:
        """Return what takes time, and touches neither the job nor its group."""
        return Step("writing a checkpoint", self._write), Step("committing a checkpoint", self._commit)

    def abandon(self) -> None:
        """Remove what was written."""
        self._planner.let_go()
        if self._rank == 0:
            folder.abandon(self._final.parent, self._final.name)

    def _write(self, _: list[Any]) -> list[Any]:
        """Write this rank's share."""
        with writing_to(self._path):
            stored = self._writer.write(self._share, self._planner)
        self._planner.let_go()
        return [piece.as_json() for piece in stored]

    def _commit(self, by_rank: list[Any]) -> None:
        """Complete the checkpoint, on rank 0."""
        if self._rank != 0:
            return
        stored = tuple(Stored.from_json(piece) for pieces in by_rank for piece in pieces)
        with writing_to(self._path):
            self._writer.describe(self.metadata, stored)
            _manifest(self._parallel, self._step, self._path, self.metadata, stored).write(self._path)
            folder.commit(self._final.parent, self._final.name)
            folder.prune(self._final.parent, self._keep)


def _manifest(
    parallel: DataParallel, step: int, path: Path, metadata: Metadata, stored: tuple[Stored, ...]
) -> Manifest:
    return Manifest(
        step=step,
        world_size=parallel.world_size,
        strategy=parallel.strategy.name,
        optimizer=name_of(parallel.optimizer),
        layout=parallel.job.layout_digest,
        files={file.name: file.stat().st_size for file in path.iterdir()},
        metadata_digest=file_digest(path / METADATA),
        entries=entry_kinds(metadata),
        stored=stored,
    )


def file_digest(path: Path) -> str:
    """Return the digest of a whole, small file."""
    return xxhash.xxh3_128_hexdigest(path.read_bytes())
