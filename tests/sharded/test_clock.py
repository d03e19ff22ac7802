"""Rounds by a clock over shards: as ranks with whole models."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from stretto import (
    ACCO,
    DPU,
    Clock,
    ZeRO1,
)
from stretto.engine.runtime import Pending
from tests.processes import run_ranks
from tests.sharded.jobs import (
    WORLD_SIZE,
    Case,
    Outcome,
    mesh_of,
    sharded,
    train,
    unsharded,
)
from tests.sharded.test_laws import tolerance


class Looked:
    """Work whose lane is free when a schedule says so."""

    def __init__(self, pending: Pending[Any], answers: Any) -> None:
        self._pending, self._answers = pending, answers

    def done(self) -> bool:
        return next(self._answers)

    def result(self) -> Any:
        return self._pending.result()


def by_schedule(runtime: Any, ranks: Sequence[int]) -> None:
    """Let the lane be free when the draws of all `ranks` say so."""
    draws = [random.Random(f"clock {rank}") for rank in ranks]

    def answers() -> Any:
        while True:
            yield all([one.random() < 0.6 for one in draws])

    spawn, schedule = runtime.spawn, answers()
    runtime.spawn = lambda work: Looked(spawn(work), schedule)


def by_clock(rank: int) -> dict[str, tuple[Outcome, Outcome, set[int]]]:
    found = {}
    node = range(rank // 2 * 2, rank // 2 * 2 + 2)
    for strategy in (ACCO(), DPU(), ZeRO1()):
        case = Case(strategy=strategy, micro_batches=Clock(minimum=1, maximum=4), updates=1)
        outcomes = []
        for ranks in ([rank], node):
            if len(ranks) == 1:
                model, parallel = sharded(case, 2, 2)
                by_schedule(parallel.job.compute.runtime._runtime, ranks)
            else:
                model, parallel = unsharded(case, mesh_of(2, 2)["node"].get_group())
                by_schedule(parallel.job.compute.runtime, ranks)
            outcomes.append(train(dataclasses.replace(case, micro_batches=12), model, parallel, ranks))
        sizes = {count for one in outcomes[0].updates for counts in one.rounds for count in counts}
        found[strategy.name] = outcomes[0], outcomes[1], sizes
    return found


def test_under_a_clock_a_node_ends_a_round_where_all_its_lanes_are_free() -> None:
    for found in run_ranks(WORLD_SIZE, by_clock):
        for name, (outcome, expected, sizes) in found.items():
            assert outcome.distance(expected) <= tolerance(Case(updates=12), expected), name
            assert [one.weight for one in outcome.updates] == [one.weight for one in expected.updates], name
            assert len(sizes) > 1 or name == "zero1", name
