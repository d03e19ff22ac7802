"""A sign that a process runs, even while a long call holds Python's lock: a C++ thread answers.

Every rank keeps an empty store. Its thread answers a ping while Python is busy, and stops with the process. Another
rank sends the ping from Python, with a timeout, because no call of a `TCPStore` has one.
"""

import contextlib
import socket
import struct

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

_PING = struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 1)
"""A client's greeting and its ping, as `TCPStore` writes them; if that changes, no store answers."""


def answering(store: Store, host: str | None = None) -> tuple[TCPStore, str] | None:
    """Start to answer; None if this process has no address for it.

    Args:
        store: The job's store.
        host: This process's address for other ranks; None is the address from which it reaches the store.

    Returns:
        The store, which answers while it exists, and its address, for `answers`.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    with contextlib.suppress(OSError, RuntimeError):
        if host is None:
            if not isinstance(store, TCPStore):
                return None
            family, kind, _, _, address = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[
                0
            ]
            with socket.socket(family, kind) as towards:
                towards.connect(address)
                host = towards.getsockname()[0]
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = listener.getsockname()[1]
        own_store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return own_store, f"{host} {port}"
    return None


def answers(where: str, seconds: float) -> bool | None:
    """Return whether a process answers within about `seconds`; False if the process is gone."""
    host, _, port = where.partition(" ")
    try:
        with socket.create_connection((host, int(port)), seconds) as asked:
            asked.settimeout(seconds)
            asked.sendall(_PING)
            return bool(asked.recv(1))
    except (ConnectionRefusedError, ConnectionResetError):
        return False
    except OSError:
        return None
