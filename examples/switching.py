"""Strategies in turns: a synchronous beginning, a middle that sends little, an exact end.

    python examples/switching.py
    torchrun --nproc-per-node 2 examples/switching.py

Behind update 20 every rank steps alone and replicas are averaged every fifth update; after update 60 gradients are
summed at every update again. The loop does not notice.
"""

import torch
from torch import nn

import stretto

UPDATES = 80


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=UPDATES)
    plan = stretto.Switching(
        {
            0: stretto.ZeRO1(),
            20: stretto.Phase(stretto.LocalSGD(rate=0.2), wire="bf16"),
            60: stretto.DDP(),
        }
    )
    parallel = stretto.DataParallel(model, optimizer, plan, scheduler=scheduler, micro_batches=2)
    draws = torch.Generator().manual_seed(1 + parallel.rank)
    points = torch.randn(2 * UPDATES, 16, 8, generator=draws)  # of this rank

    def report(update: stretto.Update) -> None:
        if parallel.rank == 0 and update.step % 20 == 0:
            print(f"update {update.step}: loss {update.loss:.4f}, goes on with {parallel.strategy.name}")

    with parallel:
        for batch in parallel.feed(points, on_update=report):
            lengths = batch.norm(dim=1, keepdim=True)
            parallel.backward(nn.functional.mse_loss(model(batch), lengths))
        parallel.finish()


if __name__ == "__main__":
    main()
