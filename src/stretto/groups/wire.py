"""The simulated wire of one process behind a slow link.

A `Wire` carries one transmission after the other, in the order in which they begin.
"""

import queue
import threading
import time
from collections.abc import Callable

from stretto.link import Link


class Wire:
    """Computes when bytes that were sent over a link arrive.

    A transmission occupies the wire for 8 bytes / rate seconds, starting when the previous one ends, and arrives
    `latency` later. Arrivals therefore keep the order of sending, and one thread that sleeps until the next arrival is
    enough: nothing polls.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        self._free_from = 0.0  # in seconds of time.monotonic
        self._order = threading.Lock()
        self._under_way: queue.SimpleQueue[tuple[float, Callable[[], None]]] = queue.SimpleQueue()
        self._courier: threading.Thread | None = None

    def send(self, sent_bytes: int, arrived: Callable[[], None]) -> None:
        """Queue a transmission; call `arrived` on the courier's thread once its bytes have arrived, never early."""
        with self._order:
            self._free_from = max(self._free_from, time.monotonic()) + self.link.occupied_seconds(sent_bytes)
            self._under_way.put((self._free_from + self.link.latency_seconds, arrived))
            if self._courier is None:
                self._courier = threading.Thread(target=self._deliver, name="stretto-wire", daemon=True)
                self._courier.start()

    def _deliver(self) -> None:
        while True:
            due, arrived = self._under_way.get()
            while (left := due - time.monotonic()) > 0:
                time.sleep(left)
            arrived()
