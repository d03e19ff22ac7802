"""Ranks that are not equally fast: the clock keeps all of them computing, and the weights are right."""

import functools

import pytest

from stretto import ACCO, Clock
from stretto.groups import Link
from stretto_lab.virtual import Compute, Network, Results, Span, VirtualCluster
from tests.exactness.jobs import Case, Observed, train

MICRO_BATCH_NS = 1_000_000
SLOWNESS = {1: 3.0}
NETWORK = Network(
    link=Link(bits_per_second=1e8, latency_seconds=1e-4),
    links={2: Link(bits_per_second=2e7, latency_seconds=1e-3)},
)
CASE = Case(strategy=ACCO(), micro_batches=Clock(minimum=1, maximum=64), lengths=(90,), tokens=True)
WORLD_SIZE = 4


@functools.cache
def results(seed: int) -> Results[Observed]:
    compute = Compute(micro_batch_ns=MICRO_BATCH_NS, slowness=SLOWNESS, step_ns=200_000)
    cluster = VirtualCluster(WORLD_SIZE, network=NETWORK, compute=compute, seed=seed)
    return cluster.run(lambda rank, group: train(rank, CASE, group))


def spans(rank: int, seed: int) -> list[Span]:
    """A rank's micro-batches until its loop ended."""
    records = [record for record in results(seed).trace.records if isinstance(record, Span)]
    return [record for record in records if record.rank == rank and record.work == "micro-batch"]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("rank", range(WORLD_SIZE))
def test_every_rank_computes_without_a_pause(rank: int, seed: int) -> None:
    mine = spans(rank, seed)
    # The first waits until the ranks have agreed on the job; nobody waits again before the end.
    assert [later.start_ns for later in mine[1:]] == [earlier.stop_ns for earlier in mine[:-1]]
    updates = results(seed).values[rank].updates
    assert [update.exposed_seconds for update in updates[:-2]] == [0.0] * (len(updates) - 2)


@pytest.mark.parametrize("seed", [0, 1])
def test_throughput_is_the_sum_of_the_ranks_own_rates(seed: int) -> None:
    starts = {spans(rank, seed)[0].start_ns for rank in range(WORLD_SIZE)}
    stop = min(spans(rank, seed)[-1].stop_ns for rank in range(WORLD_SIZE))
    assert len(starts) == 1
    elapsed = stop - starts.pop()
    done = sum(span.stop_ns <= stop for rank in range(WORLD_SIZE) for span in spans(rank, seed))
    rates = [elapsed // round(MICRO_BATCH_NS * SLOWNESS.get(rank, 1.0)) for rank in range(WORLD_SIZE)]
    assert done == sum(rates)


@pytest.mark.parametrize("seed", [0, 1])
def test_slow_rank_contributes_less_and_slow_link_costs_its_rank_nothing(seed: int) -> None:
    # Without the end, where ranks whose data are used up contribute nothing while the slow one goes on.
    updates = results(seed).values[0].updates[:-2]
    totals = [sum(update.micro_batches[rank] for update in updates) for rank in range(WORLD_SIZE)]
    assert totals[0] > 60
    assert abs(totals[2] - totals[0]) <= 1
    assert abs(3 * totals[1] - totals[0]) <= 3
