"""How often a round makes the host wait for its device: as often for many buckets, tensors and layers as for few."""

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from benchmarks.synchronising import Synchronisations
from stretto import DataParallel, Options, checksums
from stretto.exchange import rotated
from stretto.strategies import STRATEGIES, Average, DiLoCo, LocalSGD, PAFTDyn, PAFTSync, Strategy
from stretto_lab.virtual import VirtualCluster
from tests.draws import part
from tests.wires import OF_GRADIENTS

WARM_UP = 3
OTHERS: dict[str, Strategy] = {
    "local with state": LocalSGD(0.5, state=True),
    "paft-sync with state": PAFTSync(2, state=True),
    "paft-dyn with state": PAFTDyn(2, maximum=4, state=True),
    "paft-sync, overlapping": PAFTSync(2, overlap=True),
    "average with a delay": Average(4, delay=1),
    "diloco with a delay": DiLoCo(4, delay=1, mix=0.5),
}
"""Averages of the optimizer's state, and averages under way beside updates."""
VARIANTS = {name: strategy() for name, strategy in STRATEGIES.items()} | OTHERS
UPDATES = {"average": 10, "local": 10, "diloco": 10, "paft-sync": 10, "paft-dyn": 10}
"""Counted: as many as these strategies go from one average to the next, so that one is among them; of others 2."""


@pytest.fixture(autouse=True)
def digests_as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "HOSTS", ())


def host_waits(
    strategy: str,
    *,
    layers: int,
    bucket_bytes: int,
    world_size: int = 2,
    guards: Any = (),
    layer: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)),
    **options: Any,
) -> Counter[str]:
    """Train a model of so many layers and return, by line, how often rank 0 was made to wait."""
    for drawn in (rotated._rotation, rotated._uniform, rotated._hadamard):
        drawn.cache_clear()  # jobs of before have drawn the same ones

    def program(rank: int, group: ProcessGroup) -> Counter[str]:
        torch.manual_seed(rank)
        model = nn.Sequential(*[layer() for _ in range(layers)])
        # A group for each layer, so that the optimizer's state is cut there; it counts its steps on the device.
        optimizer = torch.optim.AdamW(
            [{"params": list(layer.parameters())} for layer in model], lr=0.01, fused=True
        )
        settings = Options(bucket_bytes=bucket_bytes, **options)
        counted = Synchronisations()
        with counted.watching() if rank == 0 else contextlib.nullcontext():  # watching the others takes time
            parallel = DataParallel(
                model, optimizer, VARIANTS[strategy], micro_batches=2, group=counted.on(group), guards=guards,
                options=settings,
            )  # fmt: skip
            for index in range(2 * (WARM_UP + UPDATES.get(VARIANTS[strategy].name, 2))):
                if index == 2 * WARM_UP:
                    counted.lines.clear()
                parallel.micro_batch(lambda x: model(x).square().mean(), torch.randn(3, 16))
            lines = counted.lines.copy()
            parallel.finish()
        return lines

    return VirtualCluster(world_size).run(program).values[0]


def check_law(strategy: str, draws: random.Random, **settings: Any) -> Counter[str]:
    """Compare a small model in one bucket with a larger one in many; return the lines of the latter."""
    if str(settings.get("wire")).startswith("rotated"):
        # Rotations are kept by process. Of two ranks in one, chance says which of them draws and moves one.
        settings["world_size"] = 1
        host_waits(
            strategy, layers=1, bucket_bytes=2**16, **settings
        )  # makes what is kept, and is not counted
    small = host_waits(strategy, layers=draws.randint(1, 2), bucket_bytes=2**16, **settings)
    layers, bucket_bytes = draws.randint(4, 9), draws.choice([256, 512, 1024])
    large = host_waits(strategy, layers=layers, bucket_bytes=bucket_bytes, **settings)
    assert large == small
    return large


def on_wires() -> list[tuple[str, str]]:
    """All strategies on all wires, and their variants on two each."""
    draws = random.Random(7)
    pairs = [(name, wire) for name in STRATEGIES for wire in OF_GRADIENTS]
    return pairs + [(name, wire) for name in OTHERS for wire in draws.sample(OF_GRADIENTS, 2)]


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(("strategy", "wire"), part(on_wires()))
def test_a_round_makes_the_host_wait_as_often_for_many_buckets_as_for_one(strategy: str, wire: str) -> None:
    lines = check_law(strategy, random.Random(f"{strategy} {wire}"), wire=wire)
    assert lines  # something is counted


@pytest.mark.parametrize("strategy", part(["zero1", "acco", "local"]))
def test_53_batch_norms_make_the_host_wait_no_more_than_three_times_per_update(strategy: str) -> None:
    lines = host_waits(strategy, layers=53, bucket_bytes=2**16)
    updates = UPDATES.get(strategy, 2)
    rounds = 2 if strategy == "acco" else 1
    assert 0 < lines.total() <= 3 * rounds * updates
