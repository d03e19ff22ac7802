"""The clock decides how many micro-batches a round gets; replaying what it decided gives the same bits."""

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from stretto import ACCO, Clock, DataParallel
from stretto_lab.virtual import Compute, Network, VirtualCluster
from stretto_lab.virtual.network import Link
from tests.exactness.checks import check, recorded_counts
from tests.exactness.jobs import STRATEGIES, Case, describe, train
from tests.exactness.reference import trace

CASES = [
    Case(strategy=strategy, micro_batches=Clock(minimum=1, maximum=6), lengths=(12, 200), tokens=True)
    for strategy in STRATEGIES
    if strategy.overlaps and not strategy.fixes_split
]


@pytest.mark.parametrize("case", CASES, ids=describe)
def test_replaying_recorded_counts_gives_the_same_bits(case: Case) -> None:
    cluster = VirtualCluster(2, compute=Compute(micro_batch_ns=10**6, slowness={0: 7.0}, jitter=0.5))
    ranks = cluster.run(lambda rank, group: train(rank, case, group)).values
    counts = recorded_counts(ranks[0])
    check(ranks, trace(case, 2, counts), counts)
    totals = [sum(update.micro_batches[rank] for update in ranks[0].updates) for rank in range(2)]
    assert totals[1] > totals[0] > 0
    assert max(count for update in counts for by_rank in update for count in by_rank) <= 6


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
