"""Writes a checkpoint in steps that all ranks take together: each step succeeds on all ranks, or fails on all."""

import os
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from stretto import errors
from stretto.checkpoint import files as folder
from stretto.checkpoint.continuation import Continuation, Loader
from stretto.checkpoint.files import DigestingWriter, Manifest, file_digest
from stretto.engine.state import State
from stretto.errors import CheckpointError, CommunicationError, ConfigError
from stretto.parallel import DataParallel

METADATA = ".metadata"
"""The file in which PyTorch keeps what lies where."""


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
        extra: Anything picklable, for example a scheduler's state; rank 0's is saved.
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
        return folder.begin(home, parallel.steps) if ranks.rank == 0 else ""

    name = ranks.gather("beginning a checkpoint", begin)[0]
    writing = _Writing(folder.writing(home, name), state, ranks.rank)
    try:
        plans = ranks.gather("planning a checkpoint", writing.plan)
        results = ranks.gather("writing a checkpoint", lambda: writing.write(plans))
        ranks.agree("committing a checkpoint", lambda: _commit(parallel, writing, results, home / name, keep))
    except CheckpointError:
        if ranks.rank == 0:
            folder.abandon(home, name)
        raise
    return home / name


class _Writing:
    """One rank's part in writing, by PyTorch's protocol of planners and writers."""

    def __init__(self, path: Path, state: State, rank: int) -> None:
        self.path = path
        self.writer = DigestingWriter(path)
        self.metadata: Metadata | None = None
        self._state = state
        self._rank = rank
        self._planner = DefaultSavePlanner()

    def plan(self) -> SavePlan:
        """Return what this rank would write."""
        if not self.path.is_dir():
            raise CheckpointError(
                f"{self.path}, made by rank 0, is not there: expected a file system that all share"
            )
        self._planner.set_up_planner(self._state, self.writer.storage_meta(), self._rank == 0)
        self.writer.set_up_storage_writer(self._rank == 0)
        return self.writer.prepare_local_plan(self._planner.create_local_plan())

    def write(self, plans: list[SavePlan]) -> list[WriteResult]:
        """Write this rank's share of the plan that follows from all ranks' plans, the same on each."""
        plans, self.metadata = self._planner.create_global_plan(plans)
        plan = self.writer.prepare_global_plan(plans)[self._rank]
        return self.writer.write_data(self._planner.finish_plan(plan), self._planner).wait()


def _commit(
    parallel: DataParallel, writing: _Writing, results: list[list[WriteResult]], path: Path, keep: int
) -> None:
    """Complete the checkpoint, on rank 0."""
    if parallel.rank != 0 or writing.metadata is None:
        return
    writing.writer.finish(writing.metadata, results)
    _manifest(parallel, writing, writing.metadata).write(writing.path)
    folder.commit(path.parent, path.name)
    folder.prune(path.parent, keep)


def _manifest(parallel: DataParallel, writing: _Writing, metadata: Metadata) -> Manifest:
    prefix = "model."
    tensors = {
        name.removeprefix(prefix): (tuple(entry.size), str(entry.properties.dtype))
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    return Manifest(
        step=parallel.steps,
        world_size=parallel.world_size,
        strategy=parallel.strategy.name,
        optimizer=type(parallel.optimizer).__name__,
        layout=parallel.job.layout.digest(),
        model=tensors,
        files={path.name: path.stat().st_size for path in writing.path.iterdir()},
        metadata_digest=file_digest(writing.path / METADATA),
        stored=tuple(writing.writer.stored),
    )


T = TypeVar("T")


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
        """As `agree`, but return the outcomes of all ranks, which are pickled, in rank order."""
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
            raise getattr(errors, kind)(message) from cause
        outcomes = [value for _, value in records]
        outcomes[self.rank] = outcome
        return outcomes

    def _describe(self, doing: str, error: Exception) -> tuple[str, str]:
        where = f"{self._parallel.job.compute.where}, {doing}"
        if isinstance(error, CheckpointError):
            return type(error).__name__, f"{where}: {error}"
        return CheckpointError.__name__, f"{where}: {type(error).__name__}: {error}"

    def _exchange(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        record = zlib.compress(pickle.dumps(value), level=1)  # plans repeat the same names and classes
        try:
            records = self._parallel.job.exchange.gather_records(record)
        except CommunicationError as error:
            self._parallel.fail(error)
            raise
        return [pickle.loads(zlib.decompress(record)) for record in records]
