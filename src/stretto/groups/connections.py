"""The connections of a Gloo group: which are closed, and which rank was at their other end.

Note [Closed without an error]
    When a connection ends, Gloo fails the transfers that are in flight on it, but forgets
the queued sends: a wait for a queued send never returns. Gloo closes the descriptor in every case. So a look at the
descriptors finds an end that a wait may miss.
"""

import contextlib
import dataclasses
import hashlib
import os
import socket
import stat
import sys
from collections.abc import Iterator
from typing import Any

_CONNECTED = 1
"""TCP_ESTABLISHED of Linux, the first byte of TCP_INFO."""


@dataclasses.dataclass(frozen=True, slots=True)
class Connection:
    """One end of a TCP connection."""

    descriptor: int
    """Descriptor in this process."""
    inode: int
    """Inode of the socket: unlike descriptors, inodes are not reused."""
    name: str
    """Name of the connection, the same at both ends and unique."""
    own: str
    """The address of this end, without its port."""
    other: str
    """The address of the other end."""

    @property
    def is_open(self) -> bool:
        """Whether this process still holds its end."""
        with contextlib.suppress(OSError):
            return os.fstat(self.descriptor).st_ino == self.inode
        return False


def connections() -> set[Connection]:
    """Return the TCP connections of this process; empty on systems other than Linux."""
    found = set()
    for inode, descriptor, one in _own_sockets():
        with contextlib.suppress(OSError):  # not connected, or closed meanwhile
            if one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CONNECTED:
                own, other = map(_text, (one.getsockname(), one.getpeername()))
                ends = "-".join(sorted((own, other)))
                name = hashlib.blake2b(ends.encode(), digest_size=8).hexdigest()
                hosts = (end.partition(" ")[0] for end in (own, other))
                found.add(Connection(descriptor, inode, name, *hosts))
    return found


def listens_at(port: int) -> bool:
    """Return whether this process listens at `port`; False on systems other than Linux."""
    return any(
        bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) and one.getsockname()[1] == port
        for _, _, one in _own_sockets()
    )


def _text(end: Any) -> str:
    """Return an address and a port in the form that both ends write, without names of interfaces."""
    return f"{end[0].partition('%')[0].removeprefix('::ffff:')} {end[1]}"


def _own_sockets() -> Iterator[tuple[int, int, socket.socket]]:
    """Yield inode, descriptor and a copy of every TCP socket of this process.

    Linux walks through the table of the whole machine, 15 ms or more, however few sockets a process has.
    """
    if sys.platform != "linux":
        return
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                blocking = os.get_blocking(int(name))
                with socket.socket(fileno=os.dup(int(name))) as one:
                    # Where the program has set a default time-out, Python has just changed the connection itself.
                    os.set_blocking(one.fileno(), blocking)
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                        yield status.st_ino, int(name), one
