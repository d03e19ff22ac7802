"""A run is a function of its program and its seed, in any process; the seed decides the order and no number."""

import itertools
import os
import random
import sys
from typing import Any

import numpy as np
import pytest
import torch

from stretto.engine.on_device import choose_runtime
from stretto.groups import Link
from stretto_lab.testing import differing
from stretto_lab.virtual import Compute, Network, Span, VirtualCluster, VirtualGroup
from tests.exactness.jobs import STRATEGIES, Case, Observed, train
from tests.processes import run_ranks
from tests.virtual.programs import program

WORLD_SIZE = 4
NETWORK = Network(link=Link(bits_per_second=1e8, latency_seconds=1e-4))
COMPUTE = Compute(jitter=0.3, step_ns=50_000)
CASES = [Case(strategy=strategy, lengths=(7,)) for strategy in STRATEGIES]


def run(case: Case, seed: int, compute: Compute = COMPUTE) -> tuple[str, list[Observed]]:
    cluster = VirtualCluster(WORLD_SIZE, network=NETWORK, compute=compute, seed=seed)
    results = cluster.run(lambda rank, group: train(rank, case, group))
    return results.trace.digest(), list(results.values)


def run_elsewhere(rank: int) -> list[tuple[str, list[Observed]]]:
    return [run(case, seed=5) for case in CASES]


def seen(ranks: list[Observed]) -> list[tuple[Any, Any]]:
    return [(rank.shown, rank.final) for rank in ranks]


def test_one_seed_gives_one_trace_and_the_same_bits_in_another_process() -> None:
    (elsewhere,) = run_ranks(1, run_elsewhere, backend=None)
    for case, (digest, observed) in zip(CASES, elsewhere, strict=True):
        here, found = run(case, seed=5)
        assert here == digest, case.strategy
        assert differing(seen(observed), seen(found)) == [], case.strategy


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.strategy.name)
def test_other_seeds_take_other_turns_and_give_the_same_bits(case: Case) -> None:
    # Without jitter: equal costs bring all ranks to the same instants, so that only the seed tells who is first.
    runs = [run(case, seed, Compute()) for seed in range(3)]
    assert len({digest for digest, _ in runs}) == 3
    for _, observed in runs[1:]:
        assert differing(seen(runs[0][1]), seen(observed)) == []


def test_jitter_is_another_for_another_seed_and_another_rank() -> None:
    runs = [VirtualCluster(2, compute=Compute(jitter=0.3), seed=seed).run(program(2)) for seed in (0, 1)]
    costs = [
        (record.rank, record.stop_ns - record.start_ns)
        for r in runs
        for record in r.trace.records
        if isinstance(record, Span) and record.work == "micro-batch"
    ]
    assert len(costs) == len(set(costs)) == 2 * 2 * 8


def test_every_rank_draws_from_random_states_of_its_own() -> None:
    def draws(rank: int, group: torch.distributed.ProcessGroup) -> list[tuple[float, float, float]]:
        torch.manual_seed(100 + rank)
        np.random.seed(100 + rank)
        random.seed(100 + rank)
        drawn = []
        for _ in range(5):
            drawn.append((float(torch.rand(())), np.random.rand(), random.random()))
            group.charge_ns(1)
        return drawn

    together = VirtualCluster(3).run(draws).values
    alone = [
        VirtualCluster(1).run(lambda _, group, rank=rank: draws(rank, group)).values[0] for rank in range(3)
    ]
    assert list(together) == alone


def test_unseeded_draws_repeat_and_leave_the_process_as_it_was() -> None:
    def draw(rank: int, group: torch.distributed.ProcessGroup) -> tuple[float, float, float]:
        return float(torch.rand(())), np.random.rand(), random.random()

    def state() -> tuple[object, ...]:
        return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()

    before = state()
    first = VirtualCluster(3).run(draw).values
    assert state() == before
    torch.rand(1)
    assert VirtualCluster(3, seed=1).run(draw).values == first
    assert [(a, b) for a, b in itertools.combinations(first, 2) if a == b] == []


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads stay where the system puts them")
def test_ranks_and_lanes_share_a_processor_and_leave_the_caller_its_own() -> None:
    torch.set_num_threads(1)
    before = os.sched_getaffinity(0)
    lanes = VirtualCluster(2).run(lambda rank, group: lane_of(group)).values
    ranks = VirtualCluster(2).run(lambda rank, group: os.sched_getaffinity(0)).values
    assert [processors for processors in [*lanes, *ranks] if len(processors) != 1] == []
    assert ranks[0] == ranks[1]
    assert os.sched_getaffinity(0) == before


def lane_of(group: VirtualGroup) -> set[int]:
    return (
        choose_runtime(group, torch.device("cpu"), overlaps=True)
        .spawn(lambda: os.sched_getaffinity(0))
        .result()
    )
