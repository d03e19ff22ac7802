"""The same loop on many processes:

    torchrun --nproc-per-node 2 examples/torchrun.py

Stretto makes the process group itself (NCCL on GPUs, Gloo elsewhere). Every rank runs this script on its own share of
the data, and all ranks end with the same parameters. Without torchrun it runs on one process.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import stretto


def make_dataset() -> TensorDataset:
    """Points of eight dimensions, and the length of each."""
    points = torch.randn(1024, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(points, points.norm(dim=1, keepdim=True))


def main() -> None:
    device = stretto.local_device()
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parallel = stretto.DataParallel(model, optimizer, stretto.ACCO(), micro_batches=2, wire="bf16")

    dataset = make_dataset()
    sampler = DistributedSampler(dataset, num_replicas=parallel.world_size, rank=parallel.rank, seed=0)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for points, lengths in parallel.feed(loader):
            loss = nn.functional.mse_loss(model(points.to(device)), lengths.to(device))
            parallel.backward(loss)
    parallel.finish()

    # The committed parameters are the same on every rank, so one of them evaluates and saves.
    if parallel.rank == 0:
        points, lengths = dataset.tensors
        with torch.no_grad():
            loss = nn.functional.mse_loss(model(points.to(device)), lengths.to(device))
        print(f"{parallel.steps} updates on {parallel.world_size} ranks, loss {loss.item():.4f}")
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
