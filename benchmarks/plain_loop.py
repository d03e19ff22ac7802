"""One rank against a plain loop with the same fused optimizer: an update of each in turn, and ratios within a turn.

    python benchmarks/plain_loop.py --out benchmarks/results/DATE-plain-loop

One thread, or with --device cuda a device, which every update waits for. The plain loop runs twice in each turn, once
under a second name, which says how sure a ratio is.
"""

import argparse
import copy
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import stretto
from stretto.machine import describe_environment
from stretto_lab.observe import replace_json
from stretto_lab.recipes import StdlibGPT

MICRO_BATCHES = 4
WARM_UP = 3
"""First turns, which are left out."""
Update = Callable[[], object]


class Chain(nn.Module):
    """A thousand linear layers of 16 x 16 with their biases: 2,000 small tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(1000)])

    def forward(self, inputs: Tensor) -> Tensor:
        """Return a loss."""
        return self.layers(inputs).square().mean()


def token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean loss of predicting each token from those before."""
    return nn.functional.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())


def cases(device: torch.device) -> dict[str, tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor], Tensor]]:
    """Return model, loss and batch of every case, on `device`."""
    torch.manual_seed(0)
    gpt = StdlibGPT().build(0, 1, 0, None).model
    made = {
        "2 million parameters, 8 x 128 tokens": (gpt, token_loss, torch.randint(256, (8, 129))),
        "2 million parameters, 4 x 64 tokens": (gpt, token_loss, torch.randint(256, (4, 65))),
        "2,000 tensors of 16 x 16": (Chain(), lambda model, batch: model(batch), torch.randn(8, 16)),
    }
    return {name: (model.to(device), loss, batch.to(device)) for name, (model, loss, batch) in made.items()}


def plain(model: nn.Module, loss_of: Callable[[nn.Module, Tensor], Tensor], batch: Tensor) -> Update:
    """Return what makes one update of a plain loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def update() -> None:
        for _ in range(MICRO_BATCHES):
            (loss_of(model, batch) / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()

    return update


def ours(
    strategy: stretto.Strategy | None,
    model: nn.Module,
    loss_of: Callable[[nn.Module, Tensor], Tensor],
    batch: Tensor,
) -> Update:
    """Return what makes one update of the library's loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    parallel = stretto.DataParallel(model, optimizer, strategy, micro_batches=MICRO_BATCHES)
    batches: Iterator[Tensor] = parallel.feed(itertools.repeat(batch))

    def update() -> None:
        for one in batches:
            if parallel.backward(loss_of(model, one)) is not None:
                return

    return update


def measure(case: tuple[nn.Module, Any, Tensor], seconds: float) -> dict[str, list[float]]:
    """Return the seconds of every update, by arm."""
    model, loss_of, batch = case
    made: dict[str, Callable[..., Update]] = {
        "plain": plain,
        "default": lambda *a: ours(None, *a),
        "zero1": lambda *a: ours(stretto.ZeRO1(), *a),
        "acco": lambda *a: ours(stretto.ACCO(), *a),
        "plain again": plain,
    }
    arms = {name: make(copy.deepcopy(model), loss_of, batch) for name, make in made.items()}
    taken: dict[str, list[float]] = {name: [] for name in arms}
    order, until = list(arms), 0.0
    for turn in itertools.count():
        if turn == WARM_UP:
            until = time.monotonic() + seconds
        elif turn > WARM_UP + 1 and time.monotonic() > until:  # quartiles take two turns
            break
        order.append(order.pop(0))
        for name in order:
            started = time.perf_counter()
            arms[name]()
            if case[2].is_cuda:
                torch.cuda.synchronize()
            taken[name].append(time.perf_counter() - started)
    return {name: times[WARM_UP:] for name, times in taken.items()}


def main() -> None:
    """Measure every case, write `plain_loop.json` and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for plain_loop.json")
    parser.add_argument("--seconds", type=float, default=80, help="of every case")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: where the models live")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, case in cases(device).items():
        taken = measure(case, options.seconds)
        print(f"{name}: plain {1000 * statistics.median(taken['plain']):.2f} ms, {len(taken['plain'])} turns")
        found[name] = {}
        for arm, times in taken.items():
            speeds = [one / other for one, other in zip(taken["plain"], times, strict=True)]
            low, median, high = statistics.quantiles(speeds, n=4)
            found[name][arm] = {"seconds": times, "speed_quartiles": [low, median, high]}
            print(f"  {arm:12} {median:.3f} times as fast ({low:.3f} to {high:.3f})", flush=True)
    content = {"command": sys.argv[1:], "cases": found, "environment": describe_environment(device)}
    replace_json(options.out / "plain_loop.json", content)


if __name__ == "__main__":
    main()
