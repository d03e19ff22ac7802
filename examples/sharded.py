"""A model that FSDP2 shards inside every node, trained across nodes:

    torchrun --nproc-per-node 2 examples/sharded.py
    SHARDS=2 torchrun --nproc-per-node 4 examples/sharded.py     # two nodes of two shards on one machine

Every rank runs this script on its own share of the data. On several machines, a node's ranks are one machine's.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import stretto


def make_dataset() -> TensorDataset:
    """Points of eight dimensions, and the length of each."""
    points = torch.randn(1024, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(points, points.norm(dim=1, keepdim=True))


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    shards = int(os.environ.get("SHARDS", os.environ["LOCAL_WORLD_SIZE"]))
    nodes = dist.get_world_size() // shards
    mesh = init_device_mesh(device.type, (nodes, shards), mesh_dim_names=("node", "shard"))

    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parallel = stretto.DataParallel(
        model, optimizer, stretto.ACCO(), micro_batches=2, wire="bf16", mesh=mesh["node"]
    )

    dataset = make_dataset()
    sampler = DistributedSampler(dataset, num_replicas=parallel.world_size, rank=parallel.rank, seed=0)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    with parallel:
        for epoch in range(10):
            sampler.set_epoch(epoch)
            for points, lengths in parallel.feed(loader):
                loss = nn.functional.mse_loss(model(points.to(device)), lengths.to(device))
                parallel.backward(loss)
        parallel.finish()

    # Every rank takes part in a forward pass, and writes its own rows.
    points, lengths = dataset.tensors
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(points.to(device)), lengths.to(device))
    if parallel.rank == 0:
        print(f"{parallel.steps} updates on {nodes} nodes of {shards} shards, loss {loss.item():.4f}")
    dcp.save({"model": model.state_dict()}, checkpoint_id="model")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
