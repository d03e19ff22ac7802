"""What a wire keeps, measured on two ranks."""

import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from stretto import (
    ACCO,
    DDP,
    Average,
    DataParallel,
    DiLoCo,
    LocalSGD,
    Options,
    PAFTSync,
    WeightPrediction,
    ZeRO1,
)
from stretto.strategies import Strategy
from stretto_lab.estimate.times import kept_by_wire
from tests.draws import part
from tests.processes import run_ranks
from tests.sharded.test_page import bytes_beside, storages

RANKS, WIDTH, LAYERS, UPDATES = 2, 256, 6, 4
STRATEGIES: tuple[Strategy, ...] = (
    ZeRO1(),
    DDP(),
    ACCO(),
    WeightPrediction(),
    PAFTSync(interval=2),
    LocalSGD(rate=0.5),
    DiLoCo(interval=2, delay=1),
    Average(every=2),
)
WIRES = ("fp32", "bf16", "int4", "rotated2")
LOOKS = 3


def held_by(strategy: Strategy, wire: str) -> float:
    """Bytes per parameter that a rank of a job holds between updates."""
    before = storages()  # they live until the end: a thread of Gloo may still hold what it sent last
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    options = Options(bucket_bytes=2**14)
    parallel = DataParallel(
        model, torch.optim.AdamW(model.parameters()), strategy, micro_batches=2, options=options, wire=wire
    )
    for _ in range(2 * UPDATES):
        parallel.backward(model(torch.ones(1, WIDTH)).square().mean())
    parallel.commit()
    parallel.job.replica.wait_for_transfers()
    dist.barrier()  # a lane holds more as long as it waits for the other rank
    held = min(bytes_beside(before) for _ in range(LOOKS))  # other threads may be dropping some yet
    parallel.finish()
    for thread in threading.enumerate():  # those of the job hold parts of it until they end
        if thread.name.startswith("stretto-"):
            thread.join()
    return held / (LAYERS * WIDTH**2)


def measured(rank: int) -> list[list[float]]:
    """Of every strategy: bytes per parameter on each wire."""
    held_by(ZeRO1(), "fp32")  # what the process keeps once of its first optimizer of a kind
    return [[held_by(strategy, wire) for wire in WIRES] for strategy in part(STRATEGIES)]


@pytest.mark.long
def test_a_wire_keeps_what_the_estimate_counts() -> None:
    """Scratch for the buckets on their way comes on top, on all wires; what wires keep are multiples of 2 bytes."""
    for strategy, (plain, *held) in zip(part(STRATEGIES), run_ranks(RANKS, measured)[0], strict=True):
        for wire, found in zip(WIRES[1:], held, strict=True):
            expected = kept_by_wire(strategy, wire, RANKS)
            assert found - plain == pytest.approx(expected, abs=0.9), (strategy, wire)
