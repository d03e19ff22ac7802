"""The parts of a job for a Llama of 7 billion parameters on 2 nodes of 8 shards, without memory: bytes per device.

The model is built on the meta device, from its configuration, and sharded by `fully_shard` over a group of 16 ranks of
which 15 are not there (PyTorch's fake backend). What a job makes on a rank is made of it, of tensors without memory:
the layout of its shards, a gradient buffer, and the owner's masters with the moments that an optimizer step makes.
Their bytes, as often as the ledger counts each, are set beside what the table says of as many parameters. Padding and
uneven shards make the difference. No value is computed, so this says nothing about training.

    PYTHONPATH=. python experiments/sharded_memory.py --out benchmarks/results/DATE-sharded-memory
"""

import argparse
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from stretto.engine.accumulation import GradientBuffer
from stretto.flat import plan_layout, shard_of
from stretto.machine import describe_environment
from stretto.optimizer import ShardedOptimizer
from stretto.strategies import STRATEGIES
from stretto.strategies.ledger import ledger_of
from stretto_lab.observe import replace_json

SHARDED = ("ddp", "zero1", "dpu", "wp", "acco", "local", "average", "diloco")
"""Strategies that work with shards."""
LLAMA_7B: Mapping[str, int] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
BUCKET_BYTES = 64 * 2**20
"""What a job has on a GPU."""


def joined(nodes: int, shards: int, rank: int) -> Any:
    """Join a group whose other ranks are not there, and return the mesh inside this rank's node."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=nodes * shards)
    return init_device_mesh("cpu", (nodes, shards), mesh_dim_names=("node", "shard"))["shard"]


def sharded_llama(config: Mapping[str, int], mesh: Any) -> tuple[nn.Module, int]:
    """Return a rank's shards of a Llama, without memory, and how many parameters the whole model has."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    for unit in (*model.model.layers, model):
        fully_shard(unit, mesh=mesh)
    return model, parameters


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of some tensors."""
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def parts_of(model: nn.Module, *, nodes: int, owners: int, fragments: int) -> dict[str, int]:
    """Return the bytes of one of each kind of what a job holds on a rank.

    Args:
        model: Its shards.
        nodes: That exchange gradients.
        owners: Of them, that share the optimizer.
        fragments: Of an exchange of averages.
    """
    optimizer = torch.optim.AdamW(model.parameters())
    layout, registered = plan_layout(
        model, optimizer, world_size=nodes, bucket_bytes=BUCKET_BYTES, widen=True, parts=fragments
    )
    shards = [shard_of(parameter)[0] for parameter in registered]
    owner = ShardedOptimizer(layout, shards, optimizer, rank=0, num_owners=owners)
    for segment in owner.segments:
        segment.master.grad = torch.zeros_like(segment.master)
    owner.optimizer.step()
    state = (value for one in owner.optimizer.state.values() for value in one.values())
    return {
        "shards": num_bytes(shards),
        "buffer": num_bytes(GradientBuffer(layout).flats),
        "masters": num_bytes(owner.masters.flats),
        "moments": num_bytes(value for value in state if value.numel() > 1),
        "sums": num_bytes(owner.new_sums().flats),
    }


def held_bytes(name: str, model: nn.Module, nodes: int) -> float:
    """Return what a rank holds under a strategy, by the sizes of the parts, as often as the ledger counts each."""
    strategy = STRATEGIES[name]()
    ledger = ledger_of(strategy)
    owners, fragments = (1 if ledger.replicated else nodes), max(1, ledger.fragments)
    part = parts_of(model, nodes=nodes, owners=owners, fragments=fragments)
    carried = (2 if ledger.keeps_progress else 1) / ledger.fragments if ledger.fragments else 0
    outer = (
        (1 + carried + 1 / nodes) * part["buffer"] if ledger.fragments else 0
    )  # anchor, fragment, velocity
    return (
        part["shards"]
        + part["buffer"] * (2 if strategy.overlaps or ledger.asks_ahead else 1)
        + part["masters"]
        + part["moments"]
        + (0 if ledger.local else part["sums"] * ledger.rounds)
        + outer
    )


def table(config: Mapping[str, int], nodes: int, shards: int) -> tuple[int, list[dict[str, Any]]]:
    """Return the parameters of the model, and a row per strategy: bytes of the fullest rank, and those of the table."""
    mesh = joined(
        nodes, shards, rank=0
    )  # `fully_shard` cuts as `torch.chunk` does: no shard is larger than the first
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    model, parameters = sharded_llama(config, mesh)
    rows = []
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        for name in SHARDED:
            strategy = STRATEGIES[name]()
            per_parameter = ledger_of(strategy).memory_bytes(
                strategy, parameter=4, accumulation=4, world_size=nodes
            )
            rows.append(
                {
                    "strategy": name,
                    "held_bytes": held_bytes(name, model, nodes),
                    "table_bytes": per_parameter * parameters / shards,
                }
            )
    return parameters, rows


def main() -> None:
    """Print the table, and write it to `sharded_memory.json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for sharded_memory.json")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--shards", type=int, default=8)
    options = parser.parse_args()
    parameters, rows = table(LLAMA_7B, options.nodes, options.shards)
    print(f"{parameters:,} parameters on {options.nodes} nodes of {options.shards} shards, per rank")
    print("strategy       GiB   table  ratio")
    for row in rows:
        held, expected = row["held_bytes"], row["table_bytes"]
        print(f"{row['strategy']:10} {held / 2**30:7.2f} {expected / 2**30:7.2f}  {held / expected:.4f}")
    content = {"config": dict(LLAMA_7B), "nodes": options.nodes, "shards": options.shards}
    content |= {"parameters": parameters, "rows": rows, "environment": describe_environment()}
    replace_json(options.out / "sharded_memory.json", content)


if __name__ == "__main__":
    main()
