"""What a rank asks of the job's one store does not grow with the number of ranks."""

import collections
from typing import Any

import pytest
import torch.distributed as dist

from stretto.engine.watcher import Watcher

NEVER = 600.0


class Counted:
    """A store of all ranks that counts the calls of one, and the bytes that it writes beside its signs of life."""

    def __init__(self, store: dist.Store) -> None:
        self.calls: collections.Counter[str] = collections.Counter()
        self.written = 0
        self._store = store

    def clone(self) -> "Counted":
        """Return itself: every rank has a connection of its own already."""
        return self

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            if name in ("set", "append") and not arguments[0].startswith("beat/"):
                self.written += sum(map(len, arguments))
            return method(*arguments)

        return call


def cost(ranks: int) -> tuple[int, int]:
    """Return calls of rank 1 beside three for each look, and bytes: it starts, hears a failure, says so and ends."""
    shared = dist.PrefixStore("stretto", dist.HashStore())
    stores = [Counted(shared) for _ in range(ranks)]
    watchers = [
        Watcher(store, range(ranks), rank, rank == 0, "127.0.0.1", NEVER, ())  # type: ignore[arg-type]  # it counts calls
        for rank, store in enumerate(stores)
    ]
    assert watchers[0].say("failure", "rank 0, after step 3: ValueError: planted", NEVER)
    for watcher in watchers[1:]:
        assert watcher.look(NEVER)
        assert watcher.keeper == 0
        assert watcher.heard("failure") == {0: "rank 0, after step 3: ValueError: planted"}
        assert watcher.say("heard", "", NEVER)
    assert watchers[0].hearers(NEVER) == set(range(1, ranks))
    for watcher in watchers:
        watcher.end()
    return stores[1].calls.total() - 3 * watchers[1].answers, stores[1].written


def test_a_start_a_look_and_a_failure_cost_a_rank_the_same_among_many() -> None:
    few, many = cost(10), cost(60)
    assert few[0] == many[0]
    assert many[1] == pytest.approx(few[1], abs=10)  # a port has up to five digits
    assert many[1] < 500
