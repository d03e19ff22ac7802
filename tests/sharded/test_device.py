"""A mesh of one process, on a GPU with NCCL where there is one: as plain FSDP2 and as a whole model, to the bit."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from stretto import ACCO, DDP, DataParallel, DiLoCo, WeightPrediction, ZeRO1
from stretto.strategies import Strategy
from tests.processes import run_ranks
from tests.sharded.jobs import Values, whole

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UPDATES = 6


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(48, 48) for _ in range(3)), nn.Tanh()).to(DEVICE)


def loss_of(model: nn.Module, index: int) -> torch.Tensor:
    inputs = torch.randn(8, 48, generator=torch.Generator().manual_seed(index)).to(DEVICE)
    return (model(inputs) - inputs).square().mean()


def trained(model: nn.Module, strategy: Strategy | None, **mesh: object) -> Values:
    """By a job, or by plain PyTorch where there is no strategy."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if strategy is not None:
        parallel = DataParallel(model, optimizer, strategy, micro_batches=2, **mesh)
    for index in range(2 * UPDATES):
        if strategy is not None:
            parallel.backward(loss_of(model, index))
            continue
        (loss_of(model, index) / 2).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    if strategy is not None:
        parallel.finish()
    return whole(model)


def on_one_device(rank: int) -> dict[str, list[str]]:
    """Names of values that differ, by strategy."""
    mesh = init_device_mesh(DEVICE, (1, 1), mesh_dim_names=("node", "shard"))

    def sharded() -> nn.Module:
        model = made()
        for layer in list(model)[:3]:
            fully_shard(layer, mesh=mesh["shard"])
        return fully_shard(model, mesh=mesh["shard"])

    pairs = {"fully_shard": (trained(sharded(), ZeRO1(), mesh=mesh["node"]), trained(sharded(), None))}
    for strategy in (DDP(), ACCO(), WeightPrediction(), DiLoCo(interval=3, fragments=1, delay=1)):
        pairs[strategy.name] = trained(sharded(), strategy, mesh=mesh["node"]), trained(made(), strategy)
    return {
        name: [key for key, value in one.items() if not torch.equal(value, other[key])]
        for name, (one, other) in pairs.items()
    }


def test_one_process_of_one_shard_is_plain_fully_shard_and_a_whole_model() -> None:
    (found,) = run_ranks(1, on_one_device, backend="nccl" if DEVICE == "cuda" else "gloo")
    assert found == {name: [] for name in found}
