"""Reactive reuse, driven by a loader whose every batch the test releases: no clock decides anything here."""

import itertools
from collections import Counter
from collections.abc import Iterator

from stretto import EchoLoader, EchoOptions, Ready
from tests.echo.sources import Tap


def until_ready(loader: EchoLoader[str]) -> None:
    """Wait until the reader has what was poured: the only thing its thread does. One batch is read ahead at most, so
    that taking it and putting it back changes no order."""
    reader = loader._reader
    reader._ready.put(reader._ready.get(timeout=30))


def begun(plan: Ready | None, **options: object) -> tuple[Tap, EchoLoader[str], Iterator[str]]:
    tap = Tap()
    loader = EchoLoader(tap, plan, options=EchoOptions(ahead=1, **options))
    return tap, loader, iter(loader)


def test_the_device_never_waits_and_a_ready_batch_is_taken_at_once() -> None:
    tap, loader, batches = begun(Ready(pool=4, max_uses=9))
    tap.pour("a")
    assert [next(batches) for _ in range(3)] == ["a", "a", "a"]
    tap.pour("b")
    until_ready(loader)
    assert next(batches) == "b"
    waited = loader.wait_seconds
    # b catches up with a's uses first, then both take turns, the older first.
    assert [next(batches) for _ in range(6)] == ["b", "b", "a", "b", "a", "b"]
    assert loader.wait_seconds == waited
    tap.close()


def test_a_fast_loader_is_never_echoed() -> None:
    tap, loader, batches = begun(None)
    assert loader.plan == Ready()  # the default
    for letter in "abcdef":
        tap.pour(letter)
        if letter != "a":
            until_ready(loader)
        assert (next(batches), loader.use_index) == (letter, 1)
    tap.close()
    until_ready(loader)
    assert list(batches) == []


def test_uses_stay_within_the_bound_and_then_a_fresh_batch_is_waited_for() -> None:
    tap, _, batches = begun(Ready(pool=2, max_uses=2))
    tap.pour("a")
    assert [next(batches), next(batches)] == ["a", "a"]
    tap.pour("b")  # nobody waits until it is ready: a has had its uses, so the next step does
    assert [next(batches), next(batches)] == ["b", "b"]
    tap.close()
    assert list(batches) == []


def test_the_pool_keeps_only_the_last_few() -> None:
    tap, loader, batches = begun(Ready(pool=2, max_uses=100))
    for letter in "abc":
        tap.pour(letter)
        if letter != "a":
            until_ready(loader)
        next(batches)
    later = list(itertools.islice(batches, 20))
    assert Counter(later) == {"b": 10, "c": 10}
    tap.close()


def test_an_update_uses_no_batch_twice_and_may_be_fresh_in_part() -> None:
    tap, loader, batches = begun(Ready(pool=4, max_uses=9), micro_batches=2)
    tap.pour("a", "b")  # nothing is held that the first update has not used: it waits for its second batch
    assert [next(batches) for _ in range(6)] == ["a", "b"] * 3
    tap.pour("c")
    until_ready(loader)
    assert [next(batches), next(batches)] == ["c", "a"]
    assert (loader.updates, loader.mixed_updates) == (4, 1)
    assert [next(batches), next(batches)] == ["c", "b"]
    tap.close()
