"""What people do with their models works on shards too: adapters, mixed precision, recomputation, compiling.

Two nodes of two shards equal PyTorch's HSDP of the same model under `zero1`, or one node of four plain FSDP2, to the
bit, and two ranks that hold whole models up to rounding. Tied weights and a frozen layer are in all of these models.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import MixedPrecisionPolicy

from stretto import ACCO, DataParallel, DiLoCo, ZeRO1
from stretto.strategies import Strategy
from tests.processes import run_ranks
from tests.sharded.jobs import (
    WIDTH,
    WORLD_SIZE,
    Case,
    Network,
    batch,
    loss_of,
    mesh_of,
    network,
    sgd,
    shard,
    whole,
)

Made = Callable[[], nn.Module]


class Adapted(nn.Module):
    """A frozen layer with an adapter of LoRA beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.base(values) + self.up(self.down(values))
        return result


def with_lora() -> Network:
    model = network().requires_grad_(False)
    torch.manual_seed(1)
    model.mix = nn.ModuleList(Adapted(layer) for layer in model.mix)
    return model


def recomputed() -> Network:
    model = network()
    apply_activation_checkpointing(model, check_fn=lambda module: module in set(model.mix))
    return model


MODELS: dict[str, Made] = {"plain": network, "lora": with_lora, "recomputed": recomputed}
POLICIES = {
    "fp32": None,
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "bf16, sums in fp32": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
CASE = Case(micro_batches=1, updates=4)


def cut(model: nn.Module, mesh: Any, name: str) -> nn.Module:
    policy = POLICIES[name]
    shard(model, mesh, **({} if policy is None else {"mp_policy": policy}))
    return model


def trained_by_pytorch(model: nn.Module, rank: int) -> dict[str, Tensor]:
    optimizer = sgd(model)
    for index in range(CASE.updates):
        loss_of(model, batch(rank, index)).float().backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole(model)


def trained(
    model: nn.Module,
    strategy: Strategy,
    forward: nn.Module,
    batches: Callable[[int], list[Tensor]],
    **of_job: Any,
) -> dict[str, Tensor]:
    parallel = DataParallel(
        model,
        sgd(model),
        strategy,
        micro_batches=1 + isinstance(strategy, ACCO),
        options=CASE.options,
        **of_job,
    )
    for index in range(CASE.updates * (1 + isinstance(strategy, ACCO))):
        losses = [loss_of(forward, words).float() for words in batches(index)]
        parallel.backward(sum(losses) / len(losses), len(losses))
    parallel.finish()
    return whole(model)


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


def as_pytorch_does(rank: int) -> dict[str, float]:
    found = {}
    for kind, make in MODELS.items():
        for policy in POLICIES:
            # HSDP adds up nodes in the policy's 16 bits too, a strategy in the wire's format: on one node they agree.
            nodes = 1 if policy == "bf16" else 2
            mesh = mesh_of(nodes, WORLD_SIZE // nodes)
            model = cut(make(), mesh["shard"], policy)
            ours = trained(model, ZeRO1(), model, lambda index: [batch(rank, index)], mesh=mesh["node"])
            found[f"{kind}, {policy}"] = distance(
                ours, trained_by_pytorch(cut(make(), mesh["shard"] if nodes == 1 else mesh, policy), rank)
            )
    return found


@pytest.mark.long
def test_every_model_and_precision_is_what_pytorch_makes_of_it_to_the_bit() -> None:
    for found in run_ranks(WORLD_SIZE, as_pytorch_does):
        assert found == dict.fromkeys(found, 0.0)


def as_whole_models_do(rank: int) -> dict[str, float]:
    mesh, found = mesh_of(2, 2), {}
    node = [rank - rank % 2, rank - rank % 2 + 1]
    for kind, make in MODELS.items():
        for strategy in (ACCO(), DiLoCo(interval=2, fragments=1)):
            model = cut(make(), mesh["shard"], "fp32")
            sharded = trained(model, strategy, model, lambda index: [batch(rank, index)], mesh=mesh["node"])
            model = make()
            group = mesh["node"].get_group()
            whole_models = trained(
                model, strategy, model, lambda index: [batch(one, index) for one in node], group=group
            )
            found[f"{kind}, {strategy.name}"] = distance(sharded, whole_models)
    return found


@pytest.mark.long
def test_adapters_and_recomputed_layers_are_those_of_whole_models() -> None:
    # Both round once per update, from sums in another order: of values below 4, two units per round.
    bound = 2 * 2 * CASE.updates * torch.finfo(torch.float32).eps * 4
    for found in run_ranks(WORLD_SIZE, as_whole_models_do):
        assert {name: far for name, far in found.items() if far > bound} == {}


def compiled(rank: int) -> dict[str, float]:
    mesh, found = mesh_of(2, 2), {}
    for strategy in (ZeRO1(), ACCO(), DiLoCo(interval=2, fragments=1)):
        ends = []
        for compiles in (False, True):
            model = cut(network(), mesh["shard"], "fp32")
            forward = torch.compile(model, backend="aot_eager") if compiles else model
            ends.append(
                trained(model, strategy, forward, lambda index: [batch(rank, index)], mesh=mesh["node"])
            )
        found[strategy.name] = distance(*ends)
    return found


@pytest.mark.long
def test_a_compiled_model_trains_as_one_that_is_not() -> None:
    bound = 2 * 2 * CASE.updates * torch.finfo(torch.float32).eps * 4
    for found in run_ranks(WORLD_SIZE, compiled):
        assert {name: far for name, far in found.items() if far > bound} == {}
