"""What a save holds beside the job: at most twice what it writes, and nothing once it is written."""

import dataclasses
import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stretto import ACCO, DDP, Average, DataParallel, DiLoCo, LocalSGD, WeightPrediction, ZeRO1, checkpoint

WIDTH, LAYERS = 768, 4
EVERY = 2
"""Updates: the interval of what exchanges rarely."""
STRATEGIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "ddp": (DDP(), {}),
    "zero1 on int4": (ZeRO1(), {"wire": "int4"}),
    "acco": (ACCO(), {}),
    "wp on int8": (WeightPrediction(), {"wire": "int8"}),
    "local": (LocalSGD(rate=0.1), {}),
    "average": (Average(every=EVERY, fragments=1), {}),
    "diloco": (DiLoCo(interval=EVERY), {}),
    "diloco on int4": (DiLoCo(interval=EVERY), {"wire": "int4"}),
}
every_strategy = pytest.mark.parametrize("name", STRATEGIES)
SLACK = 2**22
"""Bytes: names, plans, classes that PyTorch makes for each file."""


def job(name: str) -> DataParallel:
    torch.manual_seed(0)
    strategy, settings = STRATEGIES[name]
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    parallel = DataParallel(
        model, torch.optim.AdamW(model.parameters()), strategy, micro_batches=2, **settings
    )
    train(parallel, 2 * EVERY + 1)  # replicas differ
    return parallel


def train(parallel: DataParallel, updates: int) -> None:
    until = parallel.steps + updates
    while parallel.steps < until:
        parallel.backward(parallel.job.model.model(torch.randn(2, WIDTH)).square().mean())


@dataclasses.dataclass
class Held:
    """Bytes that something has added: Python's afterwards and at most, and tensors' afterwards."""

    kept: int = 0
    peak: int = 0
    tensors: int = 0


@contextmanager
def measured() -> Iterator[Held]:
    """The collector of cycles is off: after large values it comes late, so nothing may wait for it."""
    held = Held()
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        before, tensors = tracemalloc.get_traced_memory()[0], live_bytes()
        yield held
        held.kept, held.peak = (found - before for found in tracemalloc.get_traced_memory())
        held.tensors = live_bytes() - tensors
    finally:
        tracemalloc.stop()
        gc.enable()


def live_bytes() -> int:
    """Bytes of all tensors that are alive."""
    storages = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in gc.get_objects()
        if isinstance(one, torch.Tensor)
    }
    return sum(storages.values())


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.share"))


@pytest.mark.long(keep=1)
@every_strategy
def test_a_save_holds_its_records_twice_at_most_and_nothing_once_it_has_returned(
    name: str, tmp_path: Path
) -> None:
    """Twice: packed in a stream that grows by an eighth, or read back from the file to be compared."""
    parallel = job(name)
    checkpoint.save(parallel, tmp_path)  # what is made once
    with measured() as held:
        path = checkpoint.save(parallel, tmp_path)
    assert max(held.kept, held.tensors) < SLACK
    assert held.peak < 2 * size_of(path) + SLACK


@pytest.mark.long(keep=1)
@every_strategy
def test_a_save_beside_training_lets_go_of_its_copy_once_the_files_are_written(
    name: str, tmp_path: Path
) -> None:
    parallel = job(name)
    checkpoint.save(parallel, tmp_path)  # what is made once
    with measured() as held:
        checkpoint.save(parallel, tmp_path, async_save=True)
        while checkpoint.check(parallel):
            train(parallel, EVERY)  # so that as much is under way as before
    assert max(held.kept, held.tensors) < SLACK
