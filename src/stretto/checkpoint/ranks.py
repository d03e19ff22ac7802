"""Steps that all ranks of a job take together: each succeeds on all ranks, or fails on all."""

import json
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

from stretto.errors import (
    CheckpointError,
    CommunicationError,
    ConfigError,
    ForeignCheckpoint,
    PeerSilent,
    TornCheckpoint,
)
from stretto.fields import shown
from stretto.parallel import DataParallel

T = TypeVar("T")


_KINDS = {kind.__name__: kind for kind in (CheckpointError, TornCheckpoint, ForeignCheckpoint)}
"""Errors that a rank can have raised."""


def check_job(parallel: object) -> None:
    """Raise unless this is a job.

    Raises:
        ConfigError: Says what was found in its place.
    """
    if not isinstance(parallel, DataParallel):
        raise ConfigError(f"parallel: expected a DataParallel, found {shown(parallel)}")


class Ranks:
    """Runs steps on all ranks of a job, over the job's own group."""

    def __init__(self, parallel: DataParallel) -> None:
        self.rank = parallel.rank
        self.world_size = parallel.world_size
        self._parallel = parallel
        self._where = str(parallel.job.compute.where)  # a step in the background may end some updates later

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
        records = self._exchange(doing, (failure, outcome if share else None))
        failures = [failure for failure, _ in records if failure is not None]
        if failures:
            kind, message = failures[0]
            raise _KINDS.get(kind, CheckpointError)(message) from cause
        outcomes = [value for _, value in records]
        outcomes[self.rank] = outcome
        return outcomes

    def _describe(self, doing: str, error: Exception) -> tuple[str, str]:
        where = f"{self._where}, {doing}"
        if isinstance(error, CheckpointError):
            return type(error).__name__, f"{where}: {error}"
        line = (str(error).splitlines() or [""])[0]  # PyTorch explains at length
        return CheckpointError.__name__, f"{where}: {type(error).__name__}: {line}"

    def _exchange(self, doing: str, value: Any) -> list[Any]:
        """Return every rank's value."""
        record = zlib.compress(json.dumps(value).encode(), level=1)  # plans repeat the same names
        job = self._parallel.job
        try:
            job.replica.wait_for_transfers()
            records = job.everyone.gather_records(record)
        except Exception as error:
            cause = job.compute.lifetime.cause_of(error)
            if isinstance(cause, PeerSilent):
                cause = PeerSilent(
                    f"{self._where}, {doing}, which all ranks do after the same update: {cause}",
                    cause.ranks,
                )
            if isinstance(cause, CommunicationError):
                job.compute.lifetime.fail(cause)
            if cause is error:
                raise
            raise cause from error
        found = []
        for rank, content in enumerate(records):
            try:
                failure, outcome = json.loads(zlib.decompress(content))
            except (ValueError, TypeError, RecursionError, zlib.error) as error:
                raise CheckpointError(
                    f"{self._where}: what rank {rank} says about a checkpoint cannot be read "
                    f"({error}): expected JSON; do all ranks run the same release?"
                ) from error
            found.append((failure, outcome))
        return found
