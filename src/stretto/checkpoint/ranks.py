"""The ranks of a job, taking the steps of a checkpoint together: each step succeeds on all, or fails on all."""

import pickle
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

from stretto import errors
from stretto.errors import CheckpointError, CommunicationError
from stretto.parallel import DataParallel

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
        where = f"{self._parallel.compute.where}, {doing}"
        if isinstance(error, CheckpointError):
            return type(error).__name__, f"{where}: {error}"
        return CheckpointError.__name__, f"{where}: {type(error).__name__}: {error}"

    def _exchange(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        exchange = self._parallel.compute.lane.exchange
        record = zlib.compress(pickle.dumps(value), level=1)  # plans repeat the same names and classes
        try:
            sizes = [
                int.from_bytes(size, "little")
                for size in exchange.gather_bytes(len(record).to_bytes(8, "little"))
            ]
            records = exchange.gather_bytes(record.ljust(max(sizes), b"\0"))
        except CommunicationError as error:
            self._parallel.fail(error)
            raise
        return [
            pickle.loads(zlib.decompress(record[:size])) for record, size in zip(records, sizes, strict=True)
        ]
