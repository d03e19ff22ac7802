"""Strategies in turns, and rounds by a clock, over shards: as ranks with whole models."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from stretto import (
    ACCO,
    DPU,
    Clock,
    Phase,
    Switching,
    ZeRO1,
)
from stretto.engine.runtime import Pending
from tests.processes import run_ranks
from tests.sharded.jobs import (
    STRATEGIES,
    WORLD_SIZE,
    Case,
    Outcome,
    adamw,
    mesh_of,
    run_sharded,
    run_whole,
    sharded,
    train,
    unsharded,
)
from tests.sharded.test_laws import tolerance


def plans(wires: Sequence[str | None]) -> list[Switching]:
    """Three strategies each, so that every one takes over, and is taken over from."""
    draws = random.Random(f"plans {wires}")
    found = []
    for _ in range(4):
        strategies, starts = draws.sample(STRATEGIES, 3), sorted(draws.sample(range(1, 5), 2))
        phases = {}
        for start, strategy in zip((0, *starts), strategies, strict=True):
            wire = draws.choice([one for one in wires])
            phases[start] = strategy if wire is None else Phase(strategy, wire=wire)
        found.append(Switching(phases))
    return found


def in_turns(rank: int) -> tuple[list[tuple[Outcome, Outcome]], list[bool]]:
    nodes = []
    for plan in plans([None]):
        case = Case(strategy=plan, updates=6)
        nodes.append((run_sharded(case, rank, 2, 2), run_whole(case, rank, nodes=2)))
    alone = []
    for plan in plans([None, "int8", "int4"]):
        case = Case(strategy=plan, updates=6, optimizer=adamw)
        alone.append(run_sharded(case, rank, WORLD_SIZE, 1).equals(run_whole(case, rank)))
    return nodes, alone


def test_strategies_in_turns_are_those_of_ranks_with_whole_models() -> None:
    for nodes, alone in run_ranks(WORLD_SIZE, in_turns):
        assert all(alone), [
            plan for plan, same in zip(plans([None, "int8", "int4"]), alone, strict=True) if not same
        ]
        for plan, (outcome, expected) in zip(plans([None]), nodes, strict=True):
            assert outcome.distance(expected) <= tolerance(Case(updates=6), expected), plan
            assert [one.weight for one in outcome.updates] == [one.weight for one in expected.updates], plan


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
