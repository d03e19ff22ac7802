"""A whole script for several nodes: it goes on from checkpoints, keeps records with a page, and evaluates.

    torchrun --nproc-per-node 2 examples/four_nodes.py
    stretto report runs/four-nodes

docs/stories/four-nodes.md tells its story. The model learns the length of points; put yours in its place.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import stretto
from stretto import checkpoint


def points(count: int, seed: int) -> TensorDataset:
    places = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(places, places.norm(dim=1, keepdim=True))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--run-dir", type=Path, default=Path("runs/four-nodes"))
    parser.add_argument("--updates", type=int, default=200)
    asked = parser.parse_args()

    device = stretto.local_device()  # before the model is made
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    parallel = stretto.DataParallel(
        model, optimizer, stretto.ACCO(), scheduler=scheduler, micro_batches=4, wire="rotated2",
        options=stretto.Options(clip_norm=1.0),
    )  # fmt: skip
    saved = asked.run_dir / "checkpoints"
    if checkpoint.latest(saved) is not None:
        checkpoint.load(parallel, saved)
    data = points(4096, seed=1)
    inputs, targets = (tensor.to(device) for tensor in points(256, seed=2).tensors)

    with stretto.Recorder(asked.run_dir, parallel) as recorder:

        def on_update(update: stretto.Update) -> None:
            recorder(update)
            if update.step % 10 == 0:
                with recorder.held():  # counts as no training time
                    recorder.evaluated(
                        parallel.evaluate(lambda: nn.functional.mse_loss(model(inputs), targets))
                    )
                checkpoint.save(parallel, saved)

        while parallel.steps < asked.updates:  # every pass in another order, also after a checkpoint
            mine = DistributedSampler(data, parallel.world_size, parallel.rank, seed=parallel.steps)
            loader = DataLoader(data, batch_size=16, sampler=mine)
            for places, lengths in parallel.feed(loader, updates=asked.updates, on_update=on_update):
                parallel.backward(nn.functional.mse_loss(model(places.to(device)), lengths.to(device)))
        parallel.finish()

    if parallel.rank == 0:
        torch.save(model.state_dict(), asked.run_dir / "model.pt")
        print(f"{parallel.steps} updates on {parallel.world_size} ranks")


if __name__ == "__main__":
    main()
