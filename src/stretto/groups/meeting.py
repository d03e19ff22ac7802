"""Ranks meet before they connect: each waits until all have come, and raises if one of them dies meanwhile.

Note [Dead or late]
    While it connects, a backend waits for every rank until its time-out, for a dead rank as for a rank that still
    reads data. So each rank first writes into the store which connections it has, of the default group for example. A
    closed connection alone proves nothing: an earlier group may end at any time. If all connections between two ranks
    are closed, they may still belong to such a group, so the rank asks, and every rank in the meeting answers at its
    next look. A rank that does not answer is dead. A rank that has connected the new group answers no more, but then
    the others connect within milliseconds.

    If a rank has not come yet, only its supervisor can report that it is dead. The first rank that finds a dead rank
    writes it down before it raises, because it closes its own connections then; all report the same.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch._C._distributed_c10d import Store

from stretto.errors import CommunicationError, PeerFailed
from stretto.groups.connections import Connection, connections
from stretto.groups.deaths import deaths

T = TypeVar("T")

_LONGEST_PAUSE_SECONDS = 0.25
_ANSWER_SECONDS = 1.0
"""Longest time for an answer: four checks."""


class Meeting:
    """One rank's part in a meeting.

    Args:
        store: A store for this meeting alone.
        rank: Rank of this process in the new group.
        ranks: The supervisor's names of the new group's ranks in order; None without a supervisor.
        timeout_seconds: Seconds that the other ranks may take to come.
        watched: All connections of this process.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: Sequence[int | None],
        timeout_seconds: float,
        watched: Iterable[Connection],
    ) -> None:
        # While a backend waits for a rank it keeps the lock of the connection that it was given.
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stub
        self._rank = rank
        self._ranks = ranks
        self._timeout_seconds = timeout_seconds
        self._connections = set(watched)
        self._asked: dict[int, tuple[float, int]] = {}
        """For each rank that may be dead: the time of its last answer or of the first question, and its number of
        answers."""

    def wait(self) -> None:
        """Return once all ranks have come.

        Raises:
            PeerFailed: One of them has died.
            CommunicationError: Not all ranks came in time.
        """
        names = sorted(connection.name for connection in self._connections)
        self._store.set(f"connections/{self._rank}", " ".join(names))
        if self._store.add("came", 1) == len(self._ranks):
            self._store.set("all", "")
        deadline, pause = time.monotonic() + self._timeout_seconds, 0.001
        while not self._store.check(["all"]):
            self._raise_if(self._dead())
            if time.monotonic() > deadline:
                late = [rank for rank in range(len(self._ranks)) if not self._has_arrived(rank)]
                raise CommunicationError(
                    f"rank {self._rank}: no group over ranks {list(self._ranks)}: its ranks {late} did not "
                    f"come within {self._timeout_seconds:g} s; see their output"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def connect(self, make: Callable[[], T]) -> T:
        """Return the result of `make()`, which waits for the other ranks on its own thread.

        Raises:
            PeerFailed: One of them has died.
            RuntimeError: `make` raised it.
        """
        made: list[T] = []
        errors: list[BaseException] = []
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

        def run() -> None:
            try:
                if device is not None:
                    torch.cuda.set_device(device)  # each thread has one of its own
                made.append(make())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name="stretto-connect", daemon=True)
        thread.start()
        thread.join(_LONGEST_PAUSE_SECONDS)
        while thread.is_alive():
            self._raise_if(self._dead())
            thread.join(_LONGEST_PAUSE_SECONDS)
        if errors:
            # A death may be why. It shows after all time for an answer, and one look more.
            deadline = time.monotonic() + _ANSWER_SECONDS + 2 * _LONGEST_PAUSE_SECONDS
            self._raise_if(self._dead())
            while self._asked and time.monotonic() < deadline:
                time.sleep(_LONGEST_PAUSE_SECONDS)
                self._raise_if(self._dead())
            raise errors[0]
        return made[0]

    def _dead(self) -> dict[int, str]:
        """Return dead ranks, each with the evidence."""
        if self._store.check(["dead"]):
            return self._first_found({})
        died = {rank: how for rank, how in deaths(self._store).items() if rank in self._ranks}
        if died:
            return {self._ranks.index(rank): how for rank, how in died.items()}
        cut_off = self._cut_off()
        if cut_off:
            self._store.set("asked", "")
        if self._store.check(["asked"]):
            self._store.add(f"answers/{self._rank}", 1)
        now, before = time.monotonic(), self._asked
        answers = {rank: self._store.add(f"answers/{rank}", 0) for rank in cut_off}
        self._asked = {rank: (now, answers[rank]) for rank in cut_off}
        self._asked |= {rank: old for rank, old in before.items() if old[1] == answers.get(rank)}
        silent = [rank for rank, (since, _) in self._asked.items() if now - since >= _ANSWER_SECONDS]
        return dict.fromkeys(silent, "its connections are closed")

    def _cut_off(self) -> list[int]:
        """Return ranks in the meeting whose connections with this rank are all closed."""
        if all(connection.is_open for connection in self._connections):
            return []
        watched = {connection.name for connection in self._connections}
        # A descriptor that its owner has not looked at stays open when the other end is gone; the system's table tells.
        still = watched & {connection.name for connection in connections()}
        cut_off = []
        for rank in range(len(self._ranks)):
            if rank != self._rank and self._has_arrived(rank):
                shared = watched.intersection(self._store.get(f"connections/{rank}").decode().split())
                if shared and shared.isdisjoint(still):
                    cut_off.append(rank)
        return cut_off

    def _has_arrived(self, rank: int) -> bool:
        return self._store.check([f"connections/{rank}"])

    def _first_found(self, dead: dict[int, str]) -> dict[int, str]:
        """Record a dead rank, unless another rank has; return the record."""
        found: dict[str, str] = json.loads(self._store.compare_set("dead", "", json.dumps(dead)))
        return {int(rank): how for rank, how in found.items()}

    def _raise_if(self, dead: dict[int, str]) -> None:
        if dead:
            dead = self._first_found(dead)
            how = "; ".join(f"rank {rank} died ({why})" for rank, why in sorted(dead.items()))
            raise PeerFailed(
                f"rank {self._rank}: while a group over ranks {list(self._ranks)} was made, {how}; see its own output",
                sorted(dead),
            )
