"""The same program gives the same bits on real Gloo workers and on the virtual cluster."""

import itertools
from typing import Any

import pytest

from stretto import ACCO, DDP, DiLoCo, LocalSGD, Noise, Options
from stretto.groups import Link
from stretto.strategies import Strategy
from stretto_lab.testing import differing
from stretto_lab.virtual import Network, VirtualCluster
from tests.draws import part
from tests.exactness.jobs import STRATEGIES, Case, Observed, describe, train, train_all
from tests.processes import run_ranks
from tests.workers.jobs import STRATEGIES as OF_NODES

WORLD_SIZE = 4
WAYS: list[tuple[Strategy, dict[str, Any]]] = [
    *itertools.product(STRATEGIES, ({}, {"clip_norm": 1.25, "wire": "bf16"})),
    *itertools.product((DDP(), ACCO(), DiLoCo(interval=2)), ({"ranks_per_node": 2, "wire": "int8"},)),
    *itertools.product((ACCO(), DiLoCo(interval=2)), ({"ranks_per_node": 2, "verified": True},)),
    *itertools.product(OF_NODES[:2], ({"ranks_per_node": 2}, {"ranks_per_node": 2, "wire": "int4"})),
    *itertools.product(
        (LocalSGD(rate=0.5), DDP(), ACCO()), ({"noise": Noise(1e-3, every=(2, 0.1), averages=1e-4)},)
    ),
]
CASES = part(
    Case(
        strategy=strategy,
        tokens=True,
        batch_norm=True,
        lengths=(19,),
        options=Options(bucket_bytes=4096, **given),
    )
    for strategy, given in WAYS
)


@pytest.fixture(scope="module")
def real() -> list[list[Observed]]:
    return run_ranks(WORLD_SIZE, train_all, CASES)


@pytest.mark.long(keep=len(CASES))
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
