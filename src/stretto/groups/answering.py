"""An answer that says that a process runs, also while one long call keeps Python's lock: a thread of C++ gives it.

Every rank keeps a store of its own, which holds nothing. Its thread answers a ping whatever Python does, and stands
still with a process that is stopped. Whoever asks does so in Python, with a time-out: no call of a `TCPStore` gives up.
"""

import contextlib
import socket
import struct

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

_PING = struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 1)
"""A client's greeting and its ping, as `TCPStore` writes them; where that changes, nobody answers."""


def answering(store: Store) -> tuple[TCPStore, str] | None:
    """Begin to answer at the address from which this process reaches the store of its job; None without one.

    Returns:
        What answers as long as it lives, and where, for `answers`.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return None
    with contextlib.suppress(OSError, RuntimeError):
        family, kind, _, _, address = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as towards:
            towards.connect(address)
            own = towards.getsockname()[0]
        listener = socket.create_server((own, 0), family=family)
        port = listener.getsockname()[1]
        own_store = TCPStore(
            own, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return own_store, f"{own} {port}"
    return None


def answers(where: str, seconds: float) -> bool:
    """Return whether a process answers within about `seconds`."""
    host, _, port = where.partition(" ")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), seconds) as asked:
        asked.settimeout(seconds)
        asked.sendall(_PING)
        return bool(asked.recv(1))
    return False
