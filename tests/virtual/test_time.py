"""Overlap is an equality of virtual time.

With t a micro-batch, n of them per update, R and G the reduction and the gather, O the optimizer step (and the
preview), C = R + O + G:

    ddp, zero1    n t + C
    dpu           max(n t, C)
    wp            max(n t, C + O)
    acco          max(n_B t, C) + max(n_A t, C + M)

M is the one small exchange that ACCO's commit adds to the time model's C: its gradient is the sum of two reductions,
whose norm no round report has told.
"""

import itertools

import pytest

from stretto import ACCO, DDP, DPU, WeightPrediction, ZeRO1
from stretto.engine.report import record_dtype
from stretto.groups import Link
from stretto.strategies import Strategy
from stretto.virtual import Compute, Network, Span, VirtualCluster
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
