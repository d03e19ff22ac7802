import queue
import sys
import threading
import time
from pathlib import Path

import pytest

from stretto.groups.wire import Wire
from stretto.link import Link


def test_bytes_arrive_in_order_one_transmission_after_the_other_and_never_early() -> None:
    wire, arrivals = Wire(Link.parse("8mbit,20ms")), queue.SimpleQueue[tuple[str, float]]()
    begin = time.monotonic()
    wire.send(50_000, lambda: arrivals.put(("first", time.monotonic())))
    wire.send(30_000, lambda: arrivals.put(("second", time.monotonic())))
    (first, first_time), (second, second_time) = arrivals.get(timeout=60), arrivals.get(timeout=60)
    assert (first, second) == ("first", "second")
    assert first_time >= begin + 0.05 + 0.02  # the latency delays each, but does not occupy the wire
    assert second_time >= begin + 0.05 + 0.03 + 0.02


def test_an_idle_wire_starts_at_once() -> None:
    """What was sent long ago delays nothing: the second transmission counts from its own sending."""
    wire, arrivals = Wire(Link.parse("8mbit")), queue.SimpleQueue[float]()
    for _ in range(2):
        begin = time.monotonic()
        wire.send(10_000, lambda: arrivals.put(time.monotonic()))
        assert arrivals.get(timeout=60) >= begin + 0.01


def seconds_wanted() -> float:
    """How long this thread has run or queued for a processor so far, which counts a busy wait on any machine."""
    ran, queued, _ = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()
    return 1e-9 * (int(ran) + int(queued))


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's statistics of a thread")
def test_waiting_for_an_arrival_leaves_the_processor_to_others() -> None:
    wire, wanted = Wire(Link.parse("8mbit")), queue.SimpleQueue[float]()
    wire.send(500_000, lambda: wanted.put(seconds_wanted()))
    assert wanted.get(timeout=60) < 0.25  # of 0.5 s on the wire; one that looks at the clock wants them all
