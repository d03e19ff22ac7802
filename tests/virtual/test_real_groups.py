"""The same program gives the same bits on real Gloo workers and on the virtual cluster."""

import pytest

from stretto import Options
from stretto.groups import Link
from stretto_lab.testing import differing
from stretto_lab.virtual import Network, VirtualCluster
from tests.draws import part
from tests.exactness.jobs import STRATEGIES, Case, Observed, describe, train, train_all
from tests.processes import run_ranks

WORLD_SIZE = 3
CASES = part(
    Case(
        strategy=strategy,
        tokens=True,
        batch_norm=True,
        lengths=(11,),
        options=Options(bucket_bytes=4096, clip_norm=clip, wire=wire),
    )
    for strategy in STRATEGIES
    for clip, wire in ((None, "fp32"), (1.25, "bf16"))
)


@pytest.fixture(scope="module")
def real() -> list[list[Observed]]:
    return run_ranks(WORLD_SIZE, train_all, CASES)


@pytest.mark.parametrize("index", range(len(CASES)), ids=map(describe, CASES))
def test_real_and_virtual_ranks_see_the_same_bits(real: list[list[Observed]], index: int) -> None:
    network = Network(link=Link(bits_per_second=1e8, latency_seconds=1e-3))
    values = (
        VirtualCluster(WORLD_SIZE, network=network, seed=index)
        .run(lambda rank, group: train(rank, CASES[index], group))
        .values
    )
    for virtual, observed in zip(values, [found[index] for found in real], strict=True):
        for what in ("shown", "committed", "statistics", "final"):
            assert differing(getattr(observed, what), getattr(virtual, what), what) == []
        assert [u.loss for u in virtual.updates] == [u.loss for u in observed.updates]
