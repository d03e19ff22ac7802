"""Three hazards and their three remedies in one job, then the same job without each remedy.

    python examples/remedies.py

Two virtual ranks: the code is that of real ones, the seconds are computed. An exchange takes half as long as an update
computes, and ACCO hides it. Reading a batch takes twice as long as training on it, and an echo uses every batch twice.
Memory of rank 0 is damaged now and then, and guards mend it. Every arm trains on 64 x 4 micro-batches per rank. Without
the echo these are 256 fresh batches, not 128; the last arm reads as many as the echo, in half as many micro-batches.
Hiding and echoes gain time and cost loss here: one seed, and another job may say otherwise. Guards cost no bit of it.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import stretto
from stretto_lab.faults import Fault, FaultPlan, Injector, strike_memory
from stretto_lab.virtual import Compute, VirtualCluster, VirtualStore, parse_network

RANKS, UPDATES = 2, 64
DAMAGE = Fault(site="masters", rank=0, instant=8, lasts="sticky", rate=0.1, pattern="sign", extent="chunk")
"""From the ninth update on, one in ten: 4 KiB of the optimizer's parameters change their sign."""
ALL: dict[str, Any] = {
    "strategy": stretto.ACCO(), "uses": 2, "guards": "standard", "slow": True, "faulty": True, "micro_batches": 4
}  # fmt: skip
PERFECT = {"strategy": stretto.ZeRO1(), "uses": 1, "guards": (), "slow": False, "faulty": False}
ARMS: dict[str, dict[str, Any]] = {
    "no hazard, no remedy": PERFECT,
    "all hazards, no remedy": {**PERFECT, "slow": True, "faulty": True},
    "all remedies": {},
    "no hiding": {"strategy": stretto.ZeRO1()},
    "no echo": {"uses": 1},
    "no guards": {"guards": ()},
    "no echo, as many batches": {"uses": 1, "micro_batches": 2},
}


def points(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Points of four dimensions and a wave over them, without end."""
    draws = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(16, 4, generator=draws)
        yield x, torch.sin(2 * x[:, :2].sum(dim=1, keepdim=True))


def train(arm: dict[str, Any], rank: int, group: Any) -> tuple[float, int, float]:
    """Return the loss on fresh points at the end, the batches that were read, and the virtual seconds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 384), nn.Tanh(), nn.Linear(384, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    how = {"micro_batches": arm["micro_batches"], "guards": arm["guards"]}
    parallel = stretto.DataParallel(model, optimizer, arm["strategy"], group=group, **how)
    if arm["faulty"]:
        strike_memory(parallel, Injector(FaultPlan((DAMAGE,)), rank))
    store = VirtualStore(points(1 + rank), group, itertools.repeat(0.02 if arm["slow"] else 0.0))
    loader, updates = stretto.EchoLoader(store, stretto.Even(arm["uses"])), list[stretto.Update]()
    for x, y in parallel.feed(loader, updates=UPDATES, on_update=updates.append):
        parallel.backward(nn.functional.mse_loss(model(x), y))
    parallel.finish()
    seconds = group.now_ns / 1e9
    with torch.no_grad():
        x, y = map(torch.cat, zip(*itertools.islice(points(0), 64), strict=True))
        return nn.functional.mse_loss(model(x), y).item(), sum(one.fresh for one in updates), seconds


def main() -> None:
    for name, changes in ARMS.items():
        arm = ALL | changes
        network = parse_network("6mbit,1ms" if arm["slow"] else "free")
        cluster = VirtualCluster(RANKS, network, Compute(micro_batch_ns=10_000_000))
        loss, fresh, seconds = cluster.run(lambda rank, group, arm=arm: train(arm, rank, group)).values[0]
        print(f"{name:25} loss {loss:.4f}, {fresh} batches read, {seconds:5.2f} s")


if __name__ == "__main__":
    main()
