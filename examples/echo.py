"""A loader that is slower than the device: batches are used again while the next ones are read.

    python examples/echo.py

Reading takes 20 ms a batch here, a training step a few. `Even(3)` uses every batch three times, in the same order in
every run; `stretto.Ready()` decides by the clock instead, and suits loaders that are slow now and then. Another use is
worth less than a fresh batch, so compare losses, not steps.
"""

import time
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import stretto

FRESH_BATCHES = 40


class SlowStore(IterableDataset[tuple[Tensor, Tensor]]):
    """Points of eight dimensions and their lengths, in batches that take 20 ms to read."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        draws = torch.Generator().manual_seed(1)
        for _ in range(FRESH_BATCHES):
            time.sleep(0.02)
            points = torch.randn(64, 8, generator=draws)
            yield points, points.norm(dim=1, keepdim=True)


def train(plan: stretto.Even) -> None:
    loader = stretto.EchoLoader(DataLoader(SlowStore(), batch_size=None), plan)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    parallel = stretto.DataParallel(model, optimizer)
    fresh = echoed = 0
    started = time.perf_counter()
    for points, lengths in parallel.feed(loader):
        update = parallel.backward(nn.functional.mse_loss(model(points), lengths))
        if update:
            fresh, echoed = fresh + update.fresh, echoed + update.echoed
    parallel.finish()
    seconds = time.perf_counter() - started
    points = torch.randn(512, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(points), points.norm(dim=1, keepdim=True))
    print(f"{fresh} fresh batches, {echoed} used again, {seconds:.1f} s: held-out loss {loss.item():.4f}")


def main() -> None:
    print("every batch once, read ahead:")
    train(stretto.Even(1))
    print("every batch three times, while the next one is read:")
    train(stretto.Even(3))


if __name__ == "__main__":
    main()
