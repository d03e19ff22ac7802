"""With every wire format, what ranks send is what the ledger says, to the byte."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.engine.report import record_dtype
from stretto.exchange import WIRES, PackedWire
from stretto.flat import ALIGNMENT, Layout
from stretto.strategies import STRATEGIES, Strategy
from stretto.strategies.ledger import ledger_of
from stretto.virtual import VirtualCluster

NAMES = ("ddp", "zero1", "dpu", "wp", "acco")
"""Strategies without averages, whose ranks send the same with every update."""


class Signs(PackedWire):
    """One bit for each value, and the mean size of a block's values: a format that a test brings along."""

    name = "signs"
    block = 64
    block_bytes = 8 + 4

    def pack(self, blocks: Tensor, packed: Tensor) -> None:
        powers = 2 ** torch.arange(8, dtype=torch.uint8)
        packed[:, :8] = ((blocks < 0).view(-1, 8, 8) * powers).sum(-1, dtype=torch.uint8)
        packed[:, 8:].view(torch.float32).copy_(blocks.abs().mean(1, keepdim=True))

    def unpack(self, packed: Tensor) -> Tensor:
        bits = (packed[:, :8].unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
        return (1 - 2 * bits.view(-1, 64).float()) * packed[:, 8:].view(torch.float32)


def observed(strategy: Strategy, wire: str, rank: int, group: Any) -> tuple[Layout, list[int]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options = stretto.Options(wire=wire, bucket_bytes=1024)
    parallel = stretto.DataParallel(model, optimizer, strategy, micro_batches=2, group=group, options=options)
    updates = []
    while len(updates) < 2:
        updates.append(parallel.backward(model(torch.randn(3, 9)).square().mean()))
        updates = [update for update in updates if update is not None]
    sent = [update.sent_bytes for update in updates]
    parallel.finish()
    return parallel.job.layout, sent


@pytest.mark.parametrize("wire", [*WIRES, "signs"])
def test_an_update_sends_what_the_ledger_says(wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WIRES, Signs.name, Signs())
    format = WIRES[wire]
    gradient, value = (
        one.of(torch.float32).num_bytes(ALIGNMENT) / ALIGNMENT for one in (format, format.values)
    )
    for name, world_size in itertools.product(NAMES, (1, 2, 3)):
        strategy = STRATEGIES[name]()
        ledger = ledger_of(strategy)
        for layout, sent in (
            VirtualCluster(world_size)
            .run(lambda rank, group, strategy=strategy: observed(strategy, wire, rank, group))
            .values
        ):
            record = record_dtype(len(layout.slots), 0).itemsize
            norm = 8 if ledger.rounds > 1 else 0  # of the sum of two reductions, for the record of the update
            volume = ledger.wire_bytes(gradient, value) * layout.numel / world_size
            assert sent == [(world_size - 1) * (volume + ledger.rounds * record + norm)] * 2, (
                name,
                world_size,
            )
