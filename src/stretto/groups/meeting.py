"""Ranks meet before they connect: each waits until all have come, and hears of it if one of them dies meanwhile.

Note [Dead or late]
    A backend that connects waits for every rank until its time-out, for a dead one as for one that still reads data. So
    each rank first writes into the store which connections it has, of the default group for example. If one of these
    closes, the rank that has written the other end of it is dead. Of one that has not come yet, only whoever supervises
    it can say that. A rank that has all of the new group goes on, and may close what it had before; so who still waits
    for the backend looks once more half a second later. The first rank to find out who is dead writes it down before it
    raises, because it closes its own connections then; all report the same.
"""

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch._C._distributed_c10d import Store

from stretto.errors import CommunicationError, PeerFailed
from stretto.groups.connections import Connection
from stretto.groups.deaths import deaths

T = TypeVar("T")

_LONGEST_PAUSE_SECONDS = 0.25
_AGAIN_SECONDS = 0.5
"""After which a connection that was closed while the backend connects tells of a death."""


class Meeting:
    """One rank's part in it.

    Args:
        store: For this meeting alone.
        rank: Of this process in the new group.
        ranks: Of the new group in order, as whoever supervises them calls them.
        timeout_seconds: How long the others may take to come.
        watched: Connections of this process; none closes before the new group is there, unless its other end dies.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: Sequence[int],
        timeout_seconds: float,
        watched: Iterable[Connection],
    ) -> None:
        # While a backend waits for a rank it keeps the lock of the connection that it was given.
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stub
        self._rank = rank
        self._ranks = ranks
        self._timeout_seconds = timeout_seconds
        self._connections = set(watched)

    def wait(self) -> None:
        """Return once all have come.

        Raises:
            PeerFailed: One of them has died.
            CommunicationError: Not all came in time.
        """
        names = sorted(connection.name for connection in self._connections)
        self._store.set(f"connections/{self._rank}", " ".join(names))
        if self._store.add("came", 1) == len(self._ranks):
            self._store.set("all", "")
        deadline, pause = time.monotonic() + self._timeout_seconds, 0.001
        while not self._store.check(["all"]):
            self._raise_if(self._closed())
            if time.monotonic() > deadline:
                late = [rank for rank in range(len(self._ranks)) if not self._has_come(rank)]
                raise CommunicationError(
                    f"rank {self._rank}: no group over ranks {list(self._ranks)}: ranks {late} of it have not come "
                    f"within {self._timeout_seconds:g} s; see their output"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    def connect(self, make: Callable[[], T]) -> T:
        """Return what `make` returns, which waits for the others on a thread of its own.

        Raises:
            PeerFailed: One of them has died.
            RuntimeError: What `make` raises.
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
        since: float | None = None
        while thread.is_alive():
            closed = self._closed()
            since = (since or time.monotonic()) if closed else None
            if since is not None and time.monotonic() - since >= _AGAIN_SECONDS:
                self._raise_if(closed)
            thread.join(_LONGEST_PAUSE_SECONDS)
        if errors:
            self._raise_if(self._closed())
            raise errors[0]
        return made[0]

    def _closed(self) -> dict[int, str]:
        """Return ranks that are dead, and how it is known."""
        if self._store.check(["dead"]):
            return self._first_found({})
        died = {rank: how for rank, how in deaths(self._store).items() if rank in self._ranks}
        found = {self._ranks.index(rank): how for rank, how in died.items()}
        names = {connection.name for connection in self._connections if not connection.is_open}
        for rank in range(len(self._ranks)) if names else ():
            if rank != self._rank and self._has_come(rank):
                theirs = self._store.get(f"connections/{rank}").decode().split()
                if not names.isdisjoint(theirs):
                    found.setdefault(rank, "its connection is closed")
        return found

    def _has_come(self, rank: int) -> bool:
        return self._store.check([f"connections/{rank}"])

    def _first_found(self, dead: dict[int, str]) -> dict[int, str]:
        """Write down who is dead, if nobody has; return what is written."""
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
