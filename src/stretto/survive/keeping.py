"""The interval between states kept in memory: they take a hundredth of a job's time and bytes.

Note [Where all come]
    Ranks that step alone come together at averages. A rank whose data have ended waits there, and reaches no update
    before; the others cannot know that. So they keep states after averages alone, and none after the last average:
    the rank that has stepped last has already reached that update. If an average arrives some updates after it was
    sent, a rank without data reaches no update of the others: then data must be even, as for checkpoints.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from stretto.averaging.worker import WITHOUT_DATA
from stretto.checkpoint.load import Restored
from stretto.continuation import Loader
from stretto.parallel import DataParallel
from stretto.survive.copies import Copies
from stretto.survive.generations import Memory

SHARE = 0.01
"""Share of the time, and of the sent bytes, for keeping generations, if the library chooses the interval."""
_MOST_SECONDS = 300.0
"""Longest time between two generations, which bounds the work to repeat."""
_FIRST_UPDATES = 16
"""Updates between two generations until a complete state has been measured."""


@dataclasses.dataclass(slots=True)
class _Costs:
    """The cost of the last kept state, and the job's position then."""

    step: int = 0
    at: float = 0.0
    sent_bytes: int = 0
    """Bytes sent until then."""
    keep_seconds: float = 0.0
    """Seconds for which training stopped for it, including its copies."""
    keep_bytes: int = 0

    def measured(self, parallel: DataParallel) -> list[float] | None:
        """Return the arguments of `updates_between`; None if they would mislead.

        Before the first update a state is small: optimizers have none yet.
        """
        updates = parallel.steps - self.step
        if not self.step or not updates:
            return None
        seconds, sent = time.perf_counter() - self.at, parallel.sent_bytes - self.sent_bytes
        return [self.keep_seconds, seconds / updates, self.keep_bytes, sent / updates]


class Keeping:
    """Keeps states of one job in the memory of its ranks; all of them call each part, at the same update.

    Args:
        parallel: The job, whose end ends the copies.
        group: The group of the job's ranks, over Gloo; all of them make this, at the same place.
        memory: Memory for this rank's shares.
        every: Updates between two states; None lets the library choose.
    """

    def __init__(
        self, parallel: DataParallel, group: dist.ProcessGroup, memory: Memory, every: int | None
    ) -> None:
        self._memory = memory
        self._every = every
        self._copies = Copies(parallel, group)
        self._costs = _Costs()
        self._due = 0

    def go_on(self, parallel: DataParallel, *, loader: Loader | None, at_least: int = 0) -> Restored | None:
        """Load the newest state into the job; return None if there is none after so many updates.

        Raises:
            TornCheckpoint: No generation is whole.
            CommunicationError: A rank was lost.
        """
        return self._memory.load(parallel, self._copies, loader=loader, at_least=at_least)

    def begin(
        self,
        parallel: DataParallel,
        told: Any,
        begin: Callable[[], object] | None,
        *,
        loader: Loader | None,
        extra: Any,
    ) -> None:
        """Call `begin`, if it is given, and keep the initial state.

        Raises:
            CommunicationError: A rank was lost.
        """
        if begin is not None:
            begin()
        self.keep(parallel, told, loader=loader, extra=extra)
        self._copies.complete()  # there is no state before this one

    def is_due(self, parallel: DataParallel) -> bool:
        """Return whether enough updates have passed since the last state."""
        return parallel.steps >= self._due

    def send_on(self) -> None:
        """Send the next parts of copies, and receive parts that have arrived.

        Raises:
            CommunicationError: A rank was lost.
        """
        began = time.perf_counter()
        self._copies.go_on()
        self._costs.keep_seconds += time.perf_counter() - began

    def complete(self) -> None:
        """Wait until all copies have arrived.

        Raises:
            CommunicationError: A rank was lost.
        """
        began = time.perf_counter()
        self._copies.complete()
        self._costs.keep_seconds += time.perf_counter() - began

    def keep(
        self, parallel: DataParallel, told: Any, *, loader: Loader | None, extra: Any
    ) -> list[tuple[str, Any]]:
        """Keep the state; return every rank's machine and message.

        Raises:
            OutOfTurn: An update is in progress.
            CheckpointError: A folder has no room.
            CommunicationError: A rank was lost.
        """
        self.complete()
        began, sent_bytes = time.perf_counter(), parallel.sent_bytes
        told = [self._costs.measured(parallel), told]
        extra = extra() if callable(extra) else extra
        by_rank = self._memory.keep(parallel, self._copies, told, loader=loader, extra=extra)
        at, sent = time.perf_counter(), parallel.sent_bytes
        self._costs = _Costs(parallel.steps, at, sent, at - began, sent - sent_bytes)
        known = [measured for _, (measured, _) in by_rank if measured is not None]
        interval = max((updates_between(*one) for one in known), default=_FIRST_UPDATES)
        self._due = parallel.steps + (interval if self._every is None else self._every)
        return [(machine, told) for machine, (_, told) in by_rank]

    def end(self) -> None:
        """Take the parts that have arrived, because the job ends with an error."""
        self._copies.end()


def do_all_come(parallel: DataParallel) -> bool:
    """Return whether all ranks reach the update that was just committed; see Note [Where all come]."""
    agreement, votes = parallel.job.replica.sync, parallel.job.compute.rounds.votes
    if not agreement.steps_alone or getattr(parallel.strategy, "delay", 0) > 0:
        return True
    are_without_data = bool(votes) and all(vote in WITHOUT_DATA for vote in votes)
    return not (agreement.gap or are_without_data)


def updates_between(
    keep_seconds: float, update_seconds: float, keep_bytes: float, update_bytes: float
) -> int:
    """Return how many updates should be between two generations, from a rank's measurements.

    Args:
        keep_seconds: Seconds for which training stops to keep one.
        update_seconds: Seconds per update.
        keep_bytes: Bytes that keeping one sends, including copies.
        update_bytes: Bytes that an update sends.
    """
    by_time = keep_seconds / (SHARE * update_seconds)
    by_bytes = keep_bytes / (SHARE * update_bytes) if update_bytes else 0.0
    return max(1, math.ceil(min(max(by_time, by_bytes), _MOST_SECONDS / update_seconds)))
