"""The clock decides how many micro-batches a round gets; replaying what it decided gives the same bits."""

import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from stretto import ACCO, Clock, DataParallel
from stretto_lab.virtual import Network, VirtualCluster
from stretto_lab.virtual.network import Link
from tests.exactness import jobs
from tests.exactness.checks import check, recorded_counts
from tests.exactness.jobs import STRATEGIES, Case, Observed, describe, train
from tests.exactness.reference import trace
from tests.processes import run_ranks

CASES = [
    Case(strategy=strategy, micro_batches=Clock(minimum=1, maximum=6), lengths=(12, 200), tokens=True)
    for strategy in STRATEGIES
    if strategy.overlaps and not strategy.fixes_split
]


def train_with_slow_rank(rank: int, cases: list[Case]) -> list[Observed]:
    """Let rank 0 take many times as long for a micro-batch."""
    if rank == 0:
        quick = jobs.mean_loss
        load = torch.randn(400, 400)

        def slow(*args: object) -> torch.Tensor:
            for _ in range(20):
                load @ load
            return quick(*args)

        jobs.mean_loss = slow
    return [train(rank, case) for case in cases]


@functools.cache
def observed() -> list[list[Observed]]:
    return run_ranks(2, train_with_slow_rank, CASES)


@pytest.mark.parametrize("index", range(len(CASES)), ids=map(describe, CASES))
def test_replaying_recorded_counts_gives_the_same_bits(index: int) -> None:
    ranks = [found[index] for found in observed()]
    counts = recorded_counts(ranks[0])
    check(ranks, trace(CASES[index], 2, counts), counts)


@pytest.mark.parametrize("index", range(len(CASES)), ids=map(describe, CASES))
def test_quick_rank_contributes_more(index: int) -> None:
    totals = [sum(u.micro_batches[rank] for u in observed()[0][index].updates) for rank in range(2)]
    assert totals[1] > totals[0] > 0
    per_round = [count for u in observed()[0][index].updates for by_rank in u.rounds for count in by_rank]
    assert max(per_round) <= 6


def test_a_round_ends_with_the_lane_free_at_the_minimum_and_with_the_lane_busy_at_the_maximum() -> None:
    def program(rank: int, group: ProcessGroup) -> list[tuple[tuple[int, ...], ...]]:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parallel = DataParallel(
            model, optimizer, ACCO(), micro_batches=Clock(minimum=2, maximum=4), group=group
        )
        updates = [parallel.backward(model(torch.ones(1, 8)).sum()) for _ in range(40)]
        parallel.finish()
        return [count for update in updates if update is not None for count in update.rounds]

    busy = Network(link=Link(bits_per_second=1e3))  # an exchange takes longer than four micro-batches
    for network, expected in ((Network(), 2), (busy, 4)):
        first, *rounds = VirtualCluster(2, network=network).run(program).values[0]
        assert first == (2, 2)  # nothing is under way before
        assert rounds
        assert set(rounds) == {(expected, expected)}


@pytest.mark.parametrize("name", ["minimum", "maximum"])
def test_clock_bounds_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match="1 <= minimum <= maximum"):
        dataclasses.replace(Clock(), **{name: 0})
