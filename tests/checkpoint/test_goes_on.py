"""A run that is saved, and one that is continued from any update, are the run that never stopped, to the bit."""

import dataclasses
from typing import Any

import pytest
import torch

from stretto import (
    ACCO,
    DDP,
    DPU,
    AtRest,
    Average,
    DiLoCo,
    LocalSGD,
    Options,
    PAFTDyn,
    PAFTSync,
    WeightPrediction,
    ZeRO1,
)
from stretto.strategies import STRATEGIES, Strategy
from stretto_lab.testing import Damage, Job, goes_on
from tests.processes import run_program

APART = {"damage": Damage(site="masters"), "updates": 5}
"""Replicas that an average would make alike differ from the second update on."""
NODES = {"ranks_per_node": 2}


def job(strategy: Strategy, *, updates: int = 4, options: dict[str, Any] | None = None, **others: Any) -> Job:
    chosen = Options(
        bucket_bytes=4096, allow_unused=True, **({"clip_norm": 0.5} if options is None else options)
    )
    if "micro_batches" not in others and not strategy.overlaps:
        others["micro_batches"] = 1
    return Job(strategy=strategy, updates=updates, options=chosen, **others)


CASES = {
    "ddp": job(DDP()),
    "zero1": job(ZeRO1()),
    "dpu": job(DPU()),
    "wp": job(WeightPrediction()),
    "acco": job(ACCO()),
    "acco, sgd": job(ACCO(), optimizer="sgd"),
    "acco, int8 wire": job(ACCO(), options={"wire": "int8"}),
    "wp, int4 wire": job(WeightPrediction(), options={"wire": "int4"}),
    "wp, bf16 wire": job(WeightPrediction(), options={"wire": "bf16"}),
    "zero1, exact gradients, int4 changes": job(ZeRO1(), options={"wire": "fp32", "changes": "int4"}),
    "dpu, bf16 model and wire": job(DPU(), dtype=torch.bfloat16, options={"wire": "bf16"}),
    "local": job(LocalSGD(rate=0.25), options={}, updates=6),
    "local, state averaged, bf16 model and wire": job(
        LocalSGD(rate=0.25, state=True), dtype=torch.bfloat16, options={"wire": "bf16"}, updates=6
    ),
    "local, state averaged, sgd": job(LocalSGD(rate=0.5, state=True), optimizer="sgd"),
    "local, by coin": job(LocalSGD(rate=0.5, plan="bernoulli", state=True)),
    "average": job(Average(every=3, fragments=1, delay=2), options={}, updates=6),
    "diloco": job(DiLoCo(interval=3, delay=2, mix=0.25), options={}, updates=7),
    "diloco, int4 wire": job(DiLoCo(interval=3, delay=2), options={"wire": "int4"}, updates=7),
    "diloco, fragments": job(DiLoCo(interval=4, fragments=2, delay=1), options={"wire": "bf16"}, updates=7),
    "diloco, progress kept": job(
        DiLoCo(interval=3, delay=2, keep_progress=True), options={"wire": "int8"}, updates=7
    ),
    "diloco, nodes": job(DiLoCo(interval=3, delay=2, mix=0.25, worker="node"), options=NODES, updates=7),
    "diloco, nodes, int4 wire": job(
        DiLoCo(interval=3, delay=2, worker="node"), options={**NODES, "wire": "int4"}, updates=7
    ),
    "local, nodes": job(LocalSGD(rate=0.25, state=True, worker="node"), options=NODES, updates=5),
    **{
        f"{strategy.name}, rotated wire, guards": job(
            strategy, options={"wire": "rotated2"}, guards=(AtRest(),), updates=5
        )
        for strategy in (
            *(DDP(), ZeRO1(), DPU(), WeightPrediction(), ACCO(), LocalSGD(rate=0.5)),
            *(DiLoCo(interval=3, delay=1), PAFTSync(interval=2), PAFTDyn(first=2)),
        )
    },
    "paft-sync": job(PAFTSync(interval=4), **APART),
    "paft-sync, state averaged": job(PAFTSync(interval=4, state=True), **APART),
    "paft-dyn": job(PAFTDyn(first=2, maximum=9), **APART),
    "paft-sync, beside gradients": job(PAFTSync(interval=3, overlap=True), **APART),
    "paft-dyn, beside gradients": job(PAFTDyn(first=3, maximum=9, estimate="paper", overlap=True), **APART),
}


def test_every_strategy_is_held() -> None:
    assert {one.strategy.name for one in CASES.values()} == set(STRATEGIES)


@pytest.mark.long(keep=3)
@pytest.mark.parametrize("name", CASES)
def test_ranks_go_on_to_the_bit(name: str) -> None:
    """From the start and from the middle; where something travels, from before, while and behind; undamaged."""
    chosen = CASES[name]
    ranks = 3 if chosen.damage else 4 if chosen.options.ranks_per_node else 2
    # Saved at the second update, a job would go on without the damage that comes behind it.
    saved_at = (
        (3, 4) if chosen.damage else (5,) if ranks == 4 else (0, 2) if chosen.updates < 6 else (0, 4, 5)
    )
    assert goes_on(chosen, ranks, saved_at=saved_at) == []


@pytest.mark.long(keep=2)
@pytest.mark.parametrize(
    "name", [name for name, one in CASES.items() if not one.damage and not one.options.ranks_per_node]
)
def test_a_lone_rank_goes_on_to_the_bit(name: str) -> None:
    assert goes_on(CASES[name], 1, saved_at=(2,)) == []


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(
    "name", ["acco, int8 wire", "dpu, bf16 model and wire", "local, state averaged, sgd"]
)
def test_real_ranks_go_on_to_the_bit(name: str) -> None:
    assert goes_on(dataclasses.replace(CASES[name], updates=3), 2, saved_at=(2,), run=run_program) == []
