"""How often a round makes the host wait for its device: as often for many buckets, tensors and layers as for few."""

import contextlib
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from stretto import DataParallel, Options
from stretto.exchange import WIRES
from stretto.strategies import STRATEGIES
from stretto_lab.testing.synchronising import Synchronisations
from stretto_lab.virtual import VirtualCluster

WARM_UP = 3
UPDATES = {"average": 10, "local": 10, "diloco": 10, "paft-sync": 10, "paft-dyn": 10}
"""Counted: as many as these strategies go from one average to the next, so that one is among them; of others 2."""
_DIGESTS = ("paft-sync", "paft-dyn")
"""Compare replicas bucket by bucket."""


def host_waits(
    strategy: str, *, layers: int, bucket_bytes: int, world_size: int = 2, guards: Any = (), **options: Any
) -> Counter[str]:
    """Train a model of so many layers and return, by line, how often rank 0 was made to wait."""

    def program(rank: int, group: ProcessGroup) -> Counter[str]:
        torch.manual_seed(rank)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)) for _ in range(layers)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
        settings = Options(bucket_bytes=bucket_bytes, **options)
        counted = Synchronisations()
        with counted.watching() if rank == 0 else contextlib.nullcontext():  # watching the others takes time
            parallel = DataParallel(
                model, optimizer, STRATEGIES[strategy](), micro_batches=2, group=counted.on(group), guards=guards,
                options=settings,
            )  # fmt: skip
            for index in range(2 * (WARM_UP + UPDATES.get(strategy, 2))):
                if index == 2 * WARM_UP:
                    counted.lines.clear()
                parallel.backward(model(torch.randn(3, 16)).square().mean())
            lines = counted.lines.copy()
            parallel.finish()
        return lines

    return VirtualCluster(world_size).run(program).values[0]


def check_law(strategy: str, draws: random.Random, **settings: Any) -> Counter[str]:
    """Compare a small model in one bucket with a larger one in many; return the lines of the latter."""
    small = host_waits(strategy, layers=draws.randint(1, 2), bucket_bytes=2**16, **settings)
    layers, bucket_bytes = draws.randint(4, 9), draws.choice([256, 512, 1024])
    large = host_waits(strategy, layers=layers, bucket_bytes=bucket_bytes, **settings)
    assert large == small
    return large


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name not in _DIGESTS])
def test_a_round_makes_the_host_wait_as_often_for_many_buckets_as_for_one(strategy: str, wire: str) -> None:
    lines = check_law(strategy, random.Random(f"{strategy} {wire}"), wire=wire)
    assert lines  # something is counted


@pytest.mark.parametrize("strategy", ["zero1", "acco", "local"])
def test_53_batch_norms_make_the_host_wait_no_more_than_three_times_per_update(strategy: str) -> None:
    lines = host_waits(strategy, layers=53, bucket_bytes=2**16)
    updates = UPDATES.get(strategy, 2)
    rounds = 2 if strategy == "acco" else 1
    assert 0 < lines.total() <= 3 * rounds * updates
