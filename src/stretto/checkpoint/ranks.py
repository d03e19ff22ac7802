"""Steps that all ranks of a job take together: each succeeds on all ranks, or fails on all."""

import json
from collections.abc import Callable, Sequence
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
_FAILED = b"!"
"""Begins the record of a rank that has failed; no JSON begins with it."""


def check_job(parallel: object) -> None:
    """Raise unless this is a job.

    Raises:
        ConfigError: It is no job; names the object found.
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
        return self._run(doing, work, tells=False)[0]

    def gather(self, doing: str, work: Callable[[], T]) -> list[T]:
        """As `agree`, but return the outcomes of all ranks, which are plain JSON values, in rank order."""
        outcome, records = self._run(doing, work, tells=True)
        outcomes = [self._read(rank, record) for rank, record in enumerate(records)]
        outcomes[self.rank] = outcome
        return outcomes

    def first(self, doing: str, work: Callable[[], T]) -> T:
        """As `gather`, but return rank 0's outcome."""
        outcome, records = self._run(doing, work, tells=self.rank == 0)
        return outcome if self.rank == 0 else self._read(0, records[0])

    def collect(self, doing: str, work: Callable[[], T]) -> list[T]:
        """As `gather`, but only rank 0 reads them; the others return their own alone."""
        outcome, records = self._run(doing, work, tells=True)
        others = enumerate(records[1:], 1)
        return [outcome, *(self._read(*one) for one in others)] if self.rank == 0 else [outcome]

    def _run(self, doing: str, work: Callable[[], T], *, tells: bool) -> tuple[T, Sequence[bytes]]:
        """Return this rank's outcome and all ranks' records."""
        outcome: Any = None
        record, cause = b"", None
        try:
            outcome = work()
            if tells:
                record = json.dumps(outcome).encode()
        except Exception as error:
            cause, record = error, _FAILED + json.dumps(self._describe(doing, error)).encode()
        records = self._exchange(doing, record)
        for rank, found in enumerate(records):
            if found.startswith(_FAILED):
                kind, message = self._read(rank, found.removeprefix(_FAILED))
                raise _KINDS.get(kind, CheckpointError)(message) from cause
        return outcome, records

    def _describe(self, doing: str, error: Exception) -> tuple[str, str]:
        where = f"{self._where}, {doing}"
        if isinstance(error, CheckpointError):
            return type(error).__name__, f"{where}: {error}"
        line = (str(error).splitlines() or [""])[0]  # PyTorch explains at length
        return CheckpointError.__name__, f"{where}: {type(error).__name__}: {line}"

    def _exchange(self, doing: str, record: bytes) -> Sequence[bytes]:
        """Return every rank's record."""
        job = self._parallel.job
        try:
            job.replica.wait_for_transfers()
            return job.everyone.gather_records(record)
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

    def _read(self, rank: int, record: bytes) -> Any:
        """Return a rank's report."""
        try:
            return json.loads(record)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{self._where}: the report of rank {rank} about a checkpoint cannot be read ({error}): "
                "expected JSON; do all ranks run the same release?"
            ) from error
