"""Overlap is an equality of virtual time.

With t a micro-batch, n of them per update, R and G the reduction and the gather, O the optimizer step (and the
preview), C = R + O + G:

    ddp, zero1    n t + C
    dpu           max(n t, C)
    wp            max(n t, C + O)
    acco          max(n_B t, C) + max(n_A t, C + M)

M is the one small exchange that ACCO's commit adds to the time model's C: its gradient is the sum of two reductions,
whose norm no round report has told. A model of one bucket hides nothing under `zero1` and `ddp`; one of K buckets that
come evenly during the last backward pass t_b has, for the transfer in R,

  zero1           max(R - t_b (K - 1) / K, R / K)
"""

import itertools

import pytest
import torch
from torch import nn

from stretto import ACCO, DDP, DPU, DataParallel, Options, WeightPrediction, ZeRO1
from stretto.engine.report import record_dtype
from stretto.groups import Link
from stretto.strategies import Strategy
from stretto_lab.virtual import Compute, Network, Span, VirtualCluster, VirtualGroup
from tests.virtual.programs import program

WORLD_SIZE = 2
LATENCY_NS = 30_000
NS_PER_BYTE = 80  # 100 Mbit/s
STEP_NS = 70_000
UPDATES = 6
NETWORK = Network(link=Link(bits_per_second=1e8, latency_seconds=LATENCY_NS / 1e9))

# A weight of 32 and a bias of 4 elements, each padded to 64, in fp32; half of them go to the other of two ranks.
HALF_BYTES = 2 * 64 * 4 // 2
RECORD_BYTES = record_dtype(num_slots=2, num_buffers=0).itemsize
REDUCE_NS = 2 * LATENCY_NS + NS_PER_BYTE * (HALF_BYTES + RECORD_BYTES)
GATHER_NS = LATENCY_NS + NS_PER_BYTE * HALF_BYTES
EXCHANGE_NS = REDUCE_NS + STEP_NS + GATHER_NS
NORM_NS = LATENCY_NS + NS_PER_BYTE * 8

SETTINGS = [
    (EXCHANGE_NS // 8 + 1, 4),  # n t < C
    (EXCHANGE_NS // 4 - 1, 4),  # n t a little less than C
    (EXCHANGE_NS // 2 + 1, 4),  # half of n t more than C
    (3 * EXCHANGE_NS, 4),  # C < t
    (EXCHANGE_NS // 3, 5),  # an odd number of micro-batches
]


def update_ns(strategy: Strategy, micro_batch_ns: int, micro_batches: int) -> int:
    """The time between two updates of a run, once it is under way."""
    cluster = VirtualCluster(
        WORLD_SIZE, network=NETWORK, compute=Compute(micro_batch_ns=micro_batch_ns, step_ns=STEP_NS)
    )
    seen = cluster.run(program(UPDATES, micro_batches, strategy=strategy)).values
    assert seen[0].times_ns == seen[1].times_ns
    differences = {later - earlier for earlier, later in itertools.pairwise(seen[0].times_ns[1:])}
    assert len(differences) == 1
    return differences.pop()


@pytest.mark.parametrize(("t", "n"), SETTINGS)
class TestUpdateTime:
    @pytest.mark.parametrize("strategy", [DDP(), ZeRO1()], ids=lambda strategy: strategy.name)
    def test_synchronous_strategies_hide_nothing(self, strategy: Strategy, t: int, n: int) -> None:
        assert update_ns(strategy, t, n) == n * t + EXCHANGE_NS

    def test_dpu_hides_the_exchange_behind_an_update(self, t: int, n: int) -> None:
        assert update_ns(DPU(), t, n) == max(n * t, EXCHANGE_NS)

    def test_prediction_hides_a_step_more(self, t: int, n: int) -> None:
        assert update_ns(WeightPrediction(), t, n) == max(n * t, EXCHANGE_NS + STEP_NS)

    @pytest.mark.parametrize("first", [None, 1])
    def test_acco_hides_two_exchanges(self, t: int, n: int, first: int | None) -> None:
        strategy = ACCO(first=first)
        a, b = strategy.quotas(n, 2)
        assert update_ns(strategy, t, n) == max(b * t, EXCHANGE_NS) + max(a * t, EXCHANGE_NS + NORM_NS)


BUCKETS = 6
BUCKET_NS = NS_PER_BYTE * 256 * 4 // 2  # a weight of 16 x 16, half of which goes to the other rank
REPORT_NS = LATENCY_NS + NS_PER_BYTE * record_dtype(num_slots=BUCKETS, num_buffers=0).itemsize


def deep_update_ns(strategy: Strategy, micro_batch_ns: int, *, hide: bool) -> int:
    """The time of an update of two micro-batches of `BUCKETS` equal layers, each of which fills a bucket."""

    def run(rank: int, group: VirtualGroup) -> list[int]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(BUCKETS)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        options, times = Options(bucket_bytes=1024, hide_reductions=hide), []
        with DataParallel(
            model, optimizer, strategy, micro_batches=2, group=group, options=options
        ) as parallel:
            for _ in range(UPDATES * 2):
                if parallel.backward(model(torch.ones(2, 16)).square().mean()) is not None:
                    times.append(group.now_ns)
            parallel.finish()
        return times

    compute = Compute(micro_batch_ns=micro_batch_ns, backward_share=0.5, step_ns=STEP_NS)
    times = VirtualCluster(WORLD_SIZE, network=NETWORK, compute=compute).run(run).values[0]
    differences = {later - earlier for earlier, later in itertools.pairwise(times[1:])}
    assert len(differences) == 1
    return differences.pop()


@pytest.mark.parametrize("backward_ns", [BUCKET_NS, 3 * BUCKET_NS, 6 * BUCKET_NS, 60 * BUCKET_NS])
def test_zero1_hides_all_but_the_last_bucket_behind_the_last_backward_pass(backward_ns: int) -> None:
    exchange_ns = REPORT_NS + STEP_NS + BUCKETS * BUCKET_NS + LATENCY_NS
    compute_ns = 4 * backward_ns
    hidden_ns = max(BUCKETS * BUCKET_NS - backward_ns * (BUCKETS - 1) // BUCKETS, BUCKET_NS) + LATENCY_NS
    assert deep_update_ns(ZeRO1(), 2 * backward_ns, hide=True) == compute_ns + hidden_ns + exchange_ns
    shown_ns = BUCKETS * BUCKET_NS + LATENCY_NS
    # Four buckets at a time: with a latency below a bucket's time on the wire, the link never rests.
    assert deep_update_ns(ZeRO1(), 2 * backward_ns, hide=False) == compute_ns + shown_ns + exchange_ns


@pytest.mark.parametrize("backward_ns", [3 * BUCKET_NS, 60 * BUCKET_NS])
def test_ddp_hides_a_part_of_both_halves_of_its_reduction(backward_ns: int) -> None:
    hidden, unhidden = (deep_update_ns(DDP(), 2 * backward_ns, hide=hide) for hide in (True, False))
    wire_ns = 2 * BUCKETS * BUCKET_NS
    most = max(wire_ns - backward_ns * (BUCKETS - 1) // BUCKETS, 2 * BUCKET_NS)
    assert 4 * backward_ns + most + REPORT_NS + STEP_NS <= hidden < unhidden


def test_records_tell_virtual_seconds() -> None:
    cluster = VirtualCluster(
        WORLD_SIZE, network=NETWORK, compute=Compute(micro_batch_ns=1_000, step_ns=STEP_NS)
    )
    (seen, _) = cluster.run(program(UPDATES, 4, strategy=ZeRO1())).values
    update = seen.updates[-1]
    assert round(update.seconds * 1e9) == 4 * 1_000 + EXCHANGE_NS
    assert round(update.lane_seconds * 1e9) == round(update.exposed_seconds * 1e9) == EXCHANGE_NS


def test_elements_jitter_and_slowness_enter_the_cost() -> None:
    compute = Compute(
        micro_batch_ns=1_000,
        step_ns=10,
        step_picoseconds_per_element=500,
        preview_factor=2.0,
        slowness={1: 3.0},
    )
    results = VirtualCluster(2, compute=compute).run(program(2, strategy=WeightPrediction()))
    costs = {(r.rank, r.work, r.stop_ns - r.start_ns) for r in results.trace.records if isinstance(r, Span)}
    # Each of two ranks owns 64 elements of 128: 10 + 64 / 2 ns.
    assert costs == {
        (0, "micro-batch", 1_000), (1, "micro-batch", 3_000),
        (0, "step", 42), (1, "step", 126),
        (0, "preview", 84), (1, "preview", 252),
    }  # fmt: skip
