"""Writes a checkpoint in steps that all ranks take together: each step succeeds on all ranks, or fails on all."""

import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from stretto.checkpoint import files as folder
from stretto.checkpoint.continuation import Continuation, Loader
from stretto.checkpoint.manifest import METADATA, Manifest, Stored
from stretto.checkpoint.pieces import SavePlanner, Writer, entry_kinds
from stretto.checkpoint.plans import plan_as_json, plan_from_json
from stretto.disk import writing_to
from stretto.engine.state import State
from stretto.errors import (
    CheckpointError,
    CommunicationError,
    ConfigError,
    ForeignCheckpoint,
    TornCheckpoint,
)
from stretto.optimizer import name_of
from stretto.parallel import DataParallel


def save(
    parallel: DataParallel,
    directory: str | os.PathLike[str],
    *,
    loader: Loader | None = None,
    extra: Any = None,
    keep: int = 3,
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

    Returns:
        The checkpoint's own folder.

    Raises:
        OutOfTurn: An update is under way.
        CheckpointError: Some rank cannot write; the job can go on.
        CommunicationError: A rank died, raised or fell silent.
    """
    if keep < 1:
        raise ConfigError(f"keep={keep}: expected at least 1, the checkpoint that is being written")
    with parallel.between_updates("a checkpoint"):
        continuation = Continuation(parallel.job, parallel.scheduler)
        state = continuation.write()
    ranks = Ranks(parallel)
    home = Path(directory)

    def begin() -> str:
        state.update(continuation.write_own(state, loader, extra))
        with writing_to(home):
            return folder.begin(home, parallel.steps) if ranks.rank == 0 else ""

    name = ranks.gather("beginning a checkpoint", begin)[0]
    writing = _Writing(folder.writing(home, name), state, ranks.rank)
    try:
        plans = ranks.gather("planning a checkpoint", writing.plan)
        # Once more, now that digests are taken: a value that changes from here on differs from its digest.
        with parallel.between_updates("a checkpoint"):
            for listener in parallel.job.model.listeners:
                listener.committed_is_read()
        stored = ranks.gather("writing a checkpoint", lambda: writing.write(plans))
        ranks.agree("committing a checkpoint", lambda: _commit(parallel, writing, stored, home / name, keep))
    except CheckpointError:
        if ranks.rank == 0:
            folder.abandon(home, name)
        raise
    return home / name


class _Writing:
    """One rank's part in writing, by PyTorch's protocol of planners and writers."""

    def __init__(self, path: Path, state: State, rank: int) -> None:
        self.path = path
        self.writer = Writer(path)
        self.metadata: Metadata | None = None
        self._state = state
        self._rank = rank
        self._planner = SavePlanner()

    def plan(self) -> dict[str, Any]:
        """Return what this rank would write, and take the digests of it."""
        if not self.path.is_dir():
            raise CheckpointError(
                f"{self.path}, made by rank 0, is not there: expected a file system that all share"
            )
        self._planner.set_up_planner(self._state, self.writer.storage_meta(), self._rank == 0)
        self.writer.set_up_storage_writer(self._rank == 0)
        plan = self.writer.prepare_local_plan(self._planner.create_local_plan())
        self.writer.hold(plan, self._planner)
        return plan_as_json(plan)

    def write(self, plans: list[Any]) -> list[Any]:
        """Write this rank's share of the plan that follows from all ranks' plans, the same on each."""
        shares, self.metadata = self._planner.create_global_plan([plan_from_json(plan) for plan in plans])
        share: SavePlan = self.writer.prepare_global_plan(shares)[self._rank]
        with writing_to(self.path):
            stored = self.writer.write(self._planner.finish_plan(share), self._planner)
        return [piece.as_json() for piece in stored]


def _commit(
    parallel: DataParallel, writing: _Writing, by_rank: list[list[Any]], path: Path, keep: int
) -> None:
    """Complete the checkpoint, on rank 0."""
    if parallel.rank != 0 or writing.metadata is None:
        return
    stored = tuple(Stored.from_json(piece) for pieces in by_rank for piece in pieces)
    with writing_to(writing.path):
        writing.writer.describe(writing.metadata, stored)
        _manifest(parallel, writing.path, writing.metadata, stored).write(writing.path)
        folder.commit(path.parent, path.name)
        folder.prune(path.parent, keep)


def _manifest(parallel: DataParallel, path: Path, metadata: Metadata, stored: tuple[Stored, ...]) -> Manifest:
    return Manifest(
        step=parallel.steps,
        world_size=parallel.world_size,
        strategy=parallel.strategy.name,
        optimizer=name_of(parallel.optimizer),
        layout=parallel.job.layout.digest(),
        files={file.name: file.stat().st_size for file in path.iterdir()},
        metadata_digest=file_digest(path / METADATA),
        entries=entry_kinds(metadata),
        stored=stored,
    )


def file_digest(path: Path) -> str:
    """Return the digest of a whole, small file."""
    return xxhash.xxh3_128_hexdigest(path.read_bytes())


T = TypeVar("T")


_KINDS = {kind.__name__: kind for kind in (CheckpointError, TornCheckpoint, ForeignCheckpoint)}
"""Errors that a rank can have raised."""


class Ranks:
    """Runs steps on all ranks of a job, over the job's own group."""

    def __init__(self, parallel: DataParallel) -> None:
        self.rank = parallel.rank
        self.world_size = parallel.world_size
        self._parallel = parallel

    def agree(self, doing: str, work: Callable[[], T]) -> T:
        """Run `work` on every rank and return this rank's outcome, once all are known to have succeeded.

        Args:
            doing: What the step does, for messages.
            work: Must not communicate.

        Raises:
            CheckpointError: The same on every rank, if any failed; with its class if it was a `CheckpointError`.
        """
        return self._run(doing, work, share=False)[self.rank]

    def gather(self, doing: str, work: Callable[[], T]) -> list[T]:
        """As `agree`, but return the outcomes of all ranks, which are plain JSON values, in rank order."""
        return self._run(doing, work, share=True)

    def _run(self, doing: str, work: Callable[[], T], *, share: bool) -> list[T]:
        outcome: Any = None
        failure: tuple[str, str] | None = None
        cause: Exception | None = None
        try:
            outcome = work()
        except Exception as error:
            cause, failure = error, self._describe(doing, error)
        records = self._exchange((failure, outcome if share else None))
        failures = [failure for failure, _ in records if failure is not None]
        if failures:
            kind, message = failures[0]
            raise _KINDS.get(kind, CheckpointError)(message) from cause
        outcomes = [value for _, value in records]
        outcomes[self.rank] = outcome
        return outcomes

    def _describe(self, doing: str, error: Exception) -> tuple[str, str]:
        where = f"{self._parallel.job.compute.where}, {doing}"
        if isinstance(error, CheckpointError):
            return type(error).__name__, f"{where}: {error}"
        line = (str(error).splitlines() or [""])[0]  # PyTorch explains at length
        return CheckpointError.__name__, f"{where}: {type(error).__name__}: {line}"

    def _exchange(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        record = zlib.compress(json.dumps(value).encode(), level=1)  # plans repeat the same names
        try:
            records = self._parallel.job.exchange.gather_records(record)
        except CommunicationError as error:
            self._parallel.fail(error)
            raise
        found = []
        for rank, content in enumerate(records):
            try:
                failure, outcome = json.loads(zlib.decompress(content))
            except (ValueError, TypeError, RecursionError, zlib.error) as error:
                raise CheckpointError(
                    f"{self._parallel.job.compute.where}: what rank {rank} says about a checkpoint cannot be read "
                    f"({error}): expected JSON; do all ranks run the same release?"
                ) from error
            found.append((failure, outcome))
        return found
