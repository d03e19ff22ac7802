"""A plain PyTorch loop turned into Stretto's: the same numbers, and ready for many processes.

    python examples/plain_loop.py

`plain` and `ours` train the same model on the same batches. `ZeRO1` is the default and exact, so both end with the
same parameters, to the bit.
"""

import torch
from torch import Tensor, nn

import stretto

EPOCHS, BATCHES, MICRO_BATCHES = 5, 64, 4
UPDATES = EPOCHS * BATCHES // MICRO_BATCHES


def make_model() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=UPDATES)


def make_batches(seed: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Points of eight dimensions, and the length of each."""
    draws = torch.Generator().manual_seed(seed)
    points = torch.randn(count, 16, 8, generator=draws)
    return [(batch, batch.norm(dim=1, keepdim=True)) for batch in points]


def plain(loader: list[tuple[Tensor, Tensor]]) -> nn.Module:
    model, optimizer, scheduler = make_model()
    for _ in range(EPOCHS):
        for index, (points, lengths) in enumerate(loader, start=1):
            loss = nn.functional.mse_loss(model(points), lengths)
            (loss / MICRO_BATCHES).backward()
            if index % MICRO_BATCHES == 0:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
    return model


def ours(loader: list[tuple[Tensor, Tensor]]) -> nn.Module:
    model, optimizer, scheduler = make_model()
    parallel = stretto.DataParallel(model, optimizer, scheduler=scheduler, micro_batches=MICRO_BATCHES)
    for _ in range(EPOCHS):
        for points, lengths in parallel.feed(loader):
            loss = nn.functional.mse_loss(model(points), lengths)
            update = parallel.backward(loss)
            if update and update.step % 16 == 0:
                print(f"update {update.step}: loss {update.loss:.4f}, {update.samples} samples")
    parallel.finish()
    return model


def main() -> None:
    loader = make_batches(seed=1, count=BATCHES)
    first, second = plain(loader), ours(loader)
    ((points, lengths),) = make_batches(seed=2, count=1)
    print(f"held-out loss {nn.functional.mse_loss(second(points), lengths).item():.4f}")
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    print(f"equal to the plain loop: {all(torch.equal(one, other) for one, other in pairs)}")


if __name__ == "__main__":
    main()
