"""A job whose model is sharded inside nodes equals what it should be equal to: to the bit where sums have one order."""

import dataclasses

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from stretto import ACCO, DDP, DiLoCo, Options, ZeRO1
from tests.processes import run_ranks
from tests.sharded.jobs import (
    STRATEGIES,
    WORLD_SIZE,
    Case,
    Outcome,
    adamw,
    batch,
    loss_of,
    mesh_of,
    network,
    run_sharded,
    run_whole,
    shard,
    whole,
)

ON_WIRES = {
    "bf16": ZeRO1(),
    "int8": ACCO(),
    "int4": DiLoCo(interval=2, fragments=1, delay=1),
    "int2": DiLoCo(interval=2, fragments=1, delay=1),
    "rotated4": ACCO(),
    "rotated2": ZeRO1(),
}
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def tolerance(case: Case, outcome: Outcome) -> float:
    """Both runs round a parameter once per update, to half a unit in the last place, from gradients whose sums have
    another order: two units per update, of the largest parameter."""
    largest = max(float(value.abs().max()) for value in outcome.values.values())
    return 2 * case.updates * torch.finfo(torch.float32).eps * largest


def nodes_of_one_shard(rank: int) -> dict[str, bool]:
    unhidden = Options(bucket_bytes=512, clip_norm=0.5)
    cases = {one.name: Case(strategy=one, optimizer=adamw, options=unhidden) for one in STRATEGIES}
    for wire, strategy in ON_WIRES.items():
        options = dataclasses.replace(unhidden, wire=wire)
        cases[f"{strategy.name} on {wire}"] = Case(strategy=strategy, optimizer=adamw, options=options)
    return {
        name: run_sharded(case, rank, WORLD_SIZE, 1).equals(run_whole(case, rank))
        for name, case in cases.items()
    }


@pytest.mark.long
def test_nodes_of_one_shard_are_ranks_with_whole_models_under_every_strategy_and_wire() -> None:
    for found in run_ranks(WORLD_SIZE, nodes_of_one_shard):
        assert [name for name, is_equal in found.items() if not is_equal] == []


def plainly(case: Case, rank: int, mesh: DeviceMesh, **settings: object) -> dict[str, torch.Tensor]:
    """What PyTorch makes of the same batches by itself."""
    model = network()
    shard(model, mesh, **settings)
    optimizer = case.optimizer(model)
    for index in range(case.updates):
        for step in range(case.micro_batches):
            loss = loss_of(model, batch(rank, index * case.micro_batches + step)) / case.micro_batches
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def as_pytorch_does(rank: int) -> dict[str, float]:
    found = {}
    for precision, settings in {"fp32": {}, "mixed": {"mp_policy": MIXED}}.items():
        for strategy in (ZeRO1(), DDP()):
            case = Case(strategy=strategy, optimizer=adamw, micro_batches=1)
            expected = Outcome(
                values=plainly(case, rank, mesh_of(1, WORLD_SIZE)["shard"], **settings), updates=[]
            )
            outcome = run_sharded(case, rank, 1, WORLD_SIZE, **settings)
            found[f"{strategy.name}, {precision}, fully_shard"] = outcome.distance(expected)
        case = Case(optimizer=adamw, micro_batches=1)
        expected = Outcome(values=plainly(case, rank, mesh_of(2, 2), **settings), updates=[])
        found[f"{precision}, HSDP"] = run_sharded(case, rank, 2, 2, **settings).distance(expected)
    return found


def test_one_node_is_plain_fully_shard_and_two_nodes_are_its_hsdp_to_the_bit() -> None:
    for found in run_ranks(WORLD_SIZE, as_pytorch_does):
        assert found == dict.fromkeys(found, 0.0)


def two_nodes_of_two(rank: int) -> dict[str, tuple[Outcome, Outcome]]:
    clipped = Options(bucket_bytes=512, clip_norm=0.3)
    cases = {one.name: Case(strategy=one) for one in STRATEGIES}
    cases["acco, clipped"] = Case(strategy=ACCO(), options=clipped)
    cases["ddp, clipped"] = Case(strategy=DDP(), options=clipped)
    cases["zero1, unequal weights"] = Case(weights=(0.5, 3.0, 2.0, 1.0))
    cases["acco, weight zero on one rank"] = Case(strategy=ACCO(), weights=(1.0, 0.0, 2.0, 1.0))
    return {
        name: (run_sharded(case, rank, 2, 2), run_whole(case, rank, nodes=2)) for name, case in cases.items()
    }


def test_two_nodes_of_two_shards_are_two_ranks_with_whole_models() -> None:
    results = run_ranks(WORLD_SIZE, two_nodes_of_two)
    for rank, found in enumerate(results):
        for name, (outcome, expected) in found.items():
            assert outcome.distance(expected) <= tolerance(Case(), expected), name
            assert [one.weight for one in outcome.updates] == [one.weight for one in expected.updates], name
            norms = [one.gradient_norm for one in outcome.updates]
            assert norms == [one.gradient_norm for one in results[rank - rank % 2][name][0].updates], name
            expected_norms = [one.gradient_norm for one in expected.updates]
            torch.testing.assert_close(norms, expected_norms, msg=name, rtol=1e-5, atol=0)


def evaluated(rank: int) -> dict[str, bool]:
    found = {}
    for strategy in STRATEGIES:
        case = Case(strategy=strategy)
        seen = dataclasses.replace(case, evaluates=True)
        found[strategy.name] = run_sharded(case, rank, 2, 2).equals(run_sharded(seen, rank, 2, 2))
    return found


@pytest.mark.long
def test_an_evaluation_by_committed_parameters_changes_nothing() -> None:
    for found in run_ranks(WORLD_SIZE, evaluated):
        assert [name for name, is_equal in found.items() if not is_equal] == []
