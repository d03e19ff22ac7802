"""A Gloo group that a process can leave while others are in it and collectives are in flight.

Note [Leaving a group]
    Gloo closes the connections of a group with the last reference to it, and `abort` does nothing. Two things follow.
    If a process was stopped, lost its place in the job, and wakes, it would write into the buffers of the others, and
    no side would get an error. So a process that leaves shuts its connections: transfers in flight end on both sides,
    and nothing more arrives. The socket that listens stays, because Gloo ends the process without it.

    The destructor waits for pending work, which may take the group's whole timeout, and any garbage collection may
    run it. So the last reference is a thread's, which does nothing but drop it. Python aborts the process if it ends
    during that wait, so a process that has left groups waits for a while first.
"""

import hashlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from stretto.errors import CommunicationError
from stretto.groups.collective_group import CollectiveGroup
from stretto.groups.collectives import Call, method_of
from stretto.groups.connections import Connection, connections
from stretto.groups.meeting import Meeting
from stretto.groups.private import connections_of, opened_by
from stretto.groups.wrapped import WrappedGroup, gloo_group

MEET_SECONDS = 15.0
"""Seconds that the members of a new group may take to connect. It takes milliseconds, unless one of them has died."""
_SPARE = 8
"""Connections that other threads may have opened meanwhile."""
_NAME_BYTES = 8
_LEAVES = "stretto-leave"
"""Name of the threads that drop groups."""


class Leavable(Protocol):
    """The methods of a group that a process can leave."""

    @property
    def of_jobs(self) -> Sequence[dist.ProcessGroup]:
        """The groups that were made from this group, the first one first."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether, as far as known, no process has left it."""
        ...

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def leave(self) -> None:
        """Leave this group and the groups made from it; nothing arrives afterwards. Every later call raises."""
        ...


class LeavableGroup(WrappedGroup):
    """Gloo over the processes in a list; PyTorch's registries do not know it, unless they request it (`of_torch`).

    Every process of the list makes it, with equal arguments except for `rank`.

    Args:
        store: A store with a prefix that no other group has had.
        names: The supervisor's names of the ranks in order; None without a supervisor.
        rank: Index of this process in the list.
        timeout_seconds: Seconds after which a collective fails.
        address: Address of this machine where Gloo listens; None lets Gloo choose.

    Raises:
        PeerFailed: A rank has died, as its supervisor reports.
        CommunicationError: Not all ranks came within `MEET_SECONDS`.
    """

    may_wait_again = True

    def __init__(
        self,
        store: Store,
        names: Sequence[int | None],
        rank: int,
        *,
        timeout_seconds: float = 600.0,
        address: str | None = None,
    ) -> None:
        within = timedelta(seconds=MEET_SECONDS)
        meeting = Meeting(PrefixStore("meeting", store), rank, names, MEET_SECONDS, connections())
        place = PrefixStore("inner", store)
        try:
            meeting.wait()
            inner = opened_by(
                lambda: meeting.connect(lambda: gloo_group(place, rank, len(names), within, address))
            )
            opened = _shared(inner, within)
        except CommunicationError:
            raise
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {rank}: no group over the processes {list(names)} ({str(error).splitlines()[0]}): one of them "
                "has died, or did not ask for it"
            ) from error
        inner.set_timeout(timedelta(seconds=timeout_seconds))
        super().__init__(inner, store, "leavable")
        self.names: Sequence[int] = tuple(name for name in names if name is not None)
        self._opened = opened
        self.timeout_seconds = timeout_seconds
        """Seconds after which a collective fails."""
        self._address = address
        self._others: list[LeavableGroup] = []
        self._known_to_torch: list[LeavableGroup] = []

    def private(self) -> "LeavableGroup":
        """Return another group of the same ranks; leaving this group also leaves it."""
        return self.part(range(self.size()))

    def part(self, members: Sequence[int]) -> "LeavableGroup":
        """Return a group of some of the ranks; leaving this group also leaves it; other ranks need not call it."""
        store = part_store(self.get_group_store(), members, len(self._others))
        names = [self.names[member] for member in members]
        own = list(members).index(self.rank())
        group = LeavableGroup(store, names, own, timeout_seconds=self.timeout_seconds, address=self._address)
        self._others.append(group)
        return group

    def of_torch(self, store: Store, rank: int, world_size: int, timeout: timedelta) -> "LeavableGroup":
        """Return a group for PyTorch's registries, which know its ranks; leaving this group also leaves it.

        Args:
            store: A store with a prefix that no other group has had.
            rank: Rank of this process in the group.
            world_size: Number of ranks of the group: all ranks of this group, or some.
            timeout: Time after which a collective fails.
        """
        seconds = timeout.total_seconds()
        names = self.names if world_size == self.size() else [None] * world_size
        group = LeavableGroup(store, names, rank, timeout_seconds=seconds, address=self._address)
        self._known_to_torch.append(group)
        return group

    @property
    def of_jobs(self) -> Sequence["LeavableGroup"]:
        """The groups that were made from this group, the first one first; except PyTorch's."""
        return self._others

    @property
    def is_whole(self) -> bool:
        """Whether all connections of this group are open: Gloo closes one when its other end is gone."""
        return all(connection.is_open for connection in self._opened)

    def abort(self) -> None:
        """End transfers in flight, on this rank and at the other ends of its connections."""
        for connection in self._opened:
            _shut(connection)

    def leave(self) -> None:
        """Leave this group and the groups made from it; nothing arrives afterwards. Every later call raises."""
        for group in (*self._others, *self._known_to_torch):
            group.leave()
        self.abort()
        last, self._inner = [self._inner], _LeftGroup(self.rank(), self.size())
        if not isinstance(last[0], _LeftGroup):
            # Whatever this frame held would be dropped here, if the thread was quicker.
            threading.Thread(target=last.clear, name=_LEAVES, daemon=True).start()


def await_left(seconds: float) -> None:
    """Wait until the left groups of this process are dropped, at most so many seconds."""
    deadline = time.monotonic() + seconds
    for thread in threading.enumerate():
        if thread.name == _LEAVES:
            thread.join(max(0.0, deadline - time.monotonic()))


def part_store(store: Store, members: Sequence[int], number: int) -> Store:
    """Return the store for part `number`, counted from 0, of the group with `store`."""
    over = hashlib.blake2b(repr(list(members)).encode(), digest_size=8).hexdigest()
    return PrefixStore(f"{over}.{number}", store)


class _LeftGroup(CollectiveGroup):
    """Replaces a group that this process has left."""

    may_wait_again = True

    def perform(self, call: Call) -> dist.Work:
        """Refuse.

        Raises:
            CommunicationError: always.
        """
        raise CommunicationError(f"rank {self.rank()}: this process has left the group")

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing ever waits."""

    def abort(self) -> None:
        """Nothing is in flight."""


def _shared(group: dist.ProcessGroup, within: timedelta) -> set[Connection]:
    """Return the connections opened with `group` that another rank has also opened with it.

    Those alone are its own: another thread may have opened one meanwhile, to somebody else. It waits for all ranks.
    """
    opened = connections_of(group)
    own = torch.zeros(group.size() + _SPARE, _NAME_BYTES, dtype=torch.uint8)
    for row, connection in zip(own, sorted(opened, key=lambda one: one.name), strict=False):
        row.copy_(torch.frombuffer(bytearray.fromhex(connection.name), dtype=torch.uint8))
    every = own.new_empty(group.size() * own.numel())
    method_of(group, "all_gather_single")(every, own.view(-1)).wait(within)
    parts = every.view(group.size(), -1, _NAME_BYTES)
    named = {
        bytes(row.tolist()).hex() for rank, rows in enumerate(parts) for row in rows if rank != group.rank()
    }
    return {connection for connection in opened if connection.name in named}


def _shut(connection: Connection) -> None:
    """Shut both directions of a connection, if this process still holds it."""
    with suppress(OSError):
        descriptor = os.dup(connection.descriptor)
        if os.fstat(descriptor).st_ino != connection.inode:  # given to something else meanwhile
            os.close(descriptor)
            return
        with socket.socket(fileno=descriptor) as end:
            end.shutdown(socket.SHUT_RDWR)
