"""A loop under one torchrun for all machines: when a rank is lost, all are started again, from their machines' memory.

    torchrun ... --max-restarts 100 examples/cluster/local_checkpoints.py --folder /dev/shm/my-job

The page `survive` has the whole command.
"""

import argparse

import torch
from torch import nn

import stretto


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument(
        "--every", type=int, help="updates between two checkpoints; the library chooses without it"
    )
    options = parser.parse_args()
    device = stretto.local_device()
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parallel = stretto.DataParallel(model, optimizer, micro_batches=stretto.Total(12))
    local = stretto.LocalCheckpoints(options.folder, every=options.every)
    local.go_on(parallel)
    if parallel.rank == 0:
        print(f"{parallel.world_size} ranks, from update {parallel.steps}", flush=True)
    draws = torch.Generator().manual_seed(1_000_000 * parallel.rank + parallel.steps)
    with parallel:
        while parallel.steps < options.updates:
            points = torch.randn(16, 8, generator=draws).to(device)
            loss = nn.functional.mse_loss(model(points), points.norm(dim=1, keepdim=True))
            if (update := parallel.backward(loss)) is not None:
                if parallel.rank == 0 and update.step % 100 == 0:
                    print(f"update {update.step}: loss {update.loss:.4f}", flush=True)
                local.keep(parallel)
        parallel.finish()
    local.remove()


if __name__ == "__main__":
    main()
