"""The connections of a Gloo group: which are closed, and who was at their other end.

Note [Closed, and nobody is told]
    When a connection ends, Gloo fails the transfers that are under way on it, but forgets the sends that are queued:
    whoever waits for one of those is never told. The descriptor it closes in every case. So a look at the descriptors
    finds what a wait may miss.
"""

import contextlib
import dataclasses
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_CONNECTED, _LISTENING = "01", "0A"
"""States of a socket in Linux's tables."""
_TABLES = ("tcp", "tcp6")


@dataclasses.dataclass(frozen=True, slots=True)
class Connection:
    """One end of a TCP connection."""

    descriptor: int
    """Of this process."""
    inode: int
    """Of the socket: descriptors are given again, these are not."""
    name: str
    """The same at both ends, and of no other connection."""

    @property
    def is_open(self) -> bool:
        """Whether this process still holds its end."""
        with contextlib.suppress(OSError):
            return os.fstat(self.descriptor).st_ino == self.inode
        return False


def connections() -> set[Connection]:
    """Return the TCP connections of this process; none where the system is not Linux."""
    own = _own_sockets()
    return {
        Connection(
            own[inode], inode, hashlib.blake2b("-".join(sorted(ends)).encode(), digest_size=8).hexdigest()
        )
        for inode, state, *ends in _sockets()
        if inode in own and state == _CONNECTED
    }


def listens_at(port: int) -> bool:
    """Return whether this process waits for connections at `port`; False where the system is not Linux."""
    own = _own_sockets()
    return any(
        inode in own and state == _LISTENING and int(local.rpartition(":")[2], 16) == port
        for inode, state, local, _ in _sockets()
    )


def _own_sockets() -> dict[int, int]:
    """Return this process's descriptors of sockets, by inode."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found[status.st_ino] = int(name)
    return found


def _sockets() -> Iterator[tuple[int, str, str, str]]:
    """Yield inode, state, own address and the other end's of every TCP socket of the system."""
    for table in _TABLES:
        with contextlib.suppress(OSError):
            for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
                _, local, remote, state, _, _, _, _, _, inode, *_ = line.split()
                yield int(inode), state, local, remote
