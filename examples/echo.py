"""A tar shard on a store behind a slow link: batches are used again while the next ones are read.

    python examples/echo.py

`stretto.diagnose` measures e*, how many uses of a batch are free: load with probability 1 / e*, or use each batch e*
times. `Even(3)` does so three times, in the same order in every run; `stretto.Ready()` decides by the clock, for stores
that are slow now and then. Another use is worth less than a fresh batch, so compare losses, not steps.
"""

import io
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import stretto


class Throttled(io.FileIO):
    """A file behind a link of 128 kB/s, so that a batch with its header takes 20 ms."""

    def read(self, size: int | None = -1) -> bytes:
        found = super().read(size) or b""
        time.sleep(len(found) / 128_000)
        return found


class Shard(IterableDataset[Tensor]):
    """Batches of 64 points of eight dimensions."""

    def __init__(self, path: Path) -> None:
        self.path = path
        draws = torch.Generator().manual_seed(1)
        with tarfile.open(path, "w") as shard:
            for number in range(40):
                member = tarfile.TarInfo(str(number))
                member.size = 64 * 8 * 4
                shard.addfile(member, io.BytesIO(torch.randn(64, 8, generator=draws).numpy().tobytes()))

    def __iter__(self) -> Iterator[Tensor]:
        with Throttled(self.path) as file, tarfile.open(fileobj=file, mode="r|", bufsize=2560) as shard:
            for member in shard:
                if found := shard.extractfile(member):
                    yield torch.frombuffer(bytearray(found.read()), dtype=torch.float32).view(64, 8)


def train(loader: DataLoader[Tensor], plan: stretto.Even | None) -> str:
    """Measure without a plan; with one, train on what it gives."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    parallel = stretto.DataParallel(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    def step(points: Tensor) -> stretto.Update | None:
        return parallel.backward(nn.functional.mse_loss(model(points), points.norm(dim=1, keepdim=True)))

    if plan is None:
        free = stretto.diagnose(loader, step, batches=16).free_uses
        parallel.finish()
        return f"e* is {free:.1f}; of four uses at most, p = {1 / max(1.0, min(free, 4)):.2f} is enough"
    started = time.perf_counter()
    updates = [*map(step, parallel.feed(stretto.EchoLoader(loader, plan))), *parallel.finish()]
    seconds = time.perf_counter() - started
    fresh, echoed = (sum(getattr(one, name) for one in updates if one) for name in ("fresh", "echoed"))
    with torch.no_grad():
        points = torch.randn(512, 8, generator=torch.Generator().manual_seed(2))
        loss = nn.functional.mse_loss(model(points), points.norm(dim=1, keepdim=True))
    return f"{fresh} fresh batches, {echoed} used again, {seconds:.1f} s: held-out loss {loss.item():.4f}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        loader = DataLoader(Shard(Path(folder, "0.tar")), batch_size=None)
        for plan in (None, stretto.Even(1), stretto.Even(3)):
            print(train(loader, plan))
