import queue
import time

from stretto.groups.link import Link
from stretto.groups.wire import Wire


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
