"""With every strategy, format and shape of a job, what ranks send is what the ledger says, to the byte."""

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch
from torch import nn

import stretto
from stretto.engine.report import record_dtype
from stretto.exchange import FP32, WIRES, Wire
from stretto.flat import ALIGNMENT, Layout
from stretto.strategies import STRATEGIES, Strategy
from stretto.strategies.ledger import Ledger, ledger_of
from stretto_lab.virtual import VirtualCluster
from tests.draws import part
from tests.wires import OF_GRADIENTS

EVERY_UPDATE: dict[str, dict[str, Any]] = {
    "average": {"every": 1},
    "local": {"rate": 1.0},
    "diloco": {"interval": 1},
}
"""Options of strategies with which ranks send the same with every update. PAFT averages nothing before its tenth."""
NODES = ((1, None), (1, 2), (2, None), (2, 1), (2, 2), (3, None), (3, 1), (3, 3), (4, None), (4, 2), (4, 4))
"""Ranks, and how many of them a node has."""
SEAL, COPIES = 8, 3
"""Bytes behind each row of a verified exchange, and behind each copy of a record; and copies of a record."""
MISSING, LENGTH, NORM = 4, 8, 8
"""Bytes of small records: how many rows are missing, how long the incidents are, and a gradient's norm."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One job."""

    name: str
    world_size: int
    options: stretto.Options

    @property
    def strategy(self) -> Strategy:
        return STRATEGIES[self.name](**EVERY_UPDATE.get(self.name, {}))

    def observed(self, rank: int, group: Any) -> tuple[Layout, list[int]]:
        """Return what this rank says that it has sent with each of two updates."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        parallel = stretto.DataParallel(
            model, optimizer, self.strategy, micro_batches=2, group=group, options=self.options
        )
        updates = []
        while len(updates) < 2:
            updates.append(parallel.backward(model(torch.randn(3, 9)).square().mean()))
            updates = [update for update in updates if update is not None]
        sent = [update.sent_bytes for update in updates]
        parallel.finish()
        return parallel.job.layout, sent

    # What is foretold, for one rank and update

    def sent(self, layout: Layout) -> int:
        """All bytes."""
        volume = sum(self.volume(bucket.numel) for bucket in layout.buckets)
        return volume + (self.world_size - 1) * self.records(len(layout.slots))

    def volume(self, numel: int) -> int:
        """Bytes of a bucket: what the ledger counts, each in the format in which it travels."""
        ledger, options, wire = ledger_of(self.strategy), self.options, WIRES[self.options.wire]
        averages = 0 if ledger.averages and not ledger.local else int(ledger.averages)
        outer_steps = int(ledger.outer_steps)
        sums = (ledger.gradient_transfers + outer_steps) * self.sum_of(numel, wire)
        changes = ledger.gathers * (not ledger.replicated) + outer_steps
        return (
            sums
            + averages * self.sum_of(numel, wire.values)
            + (ledger.sum_transfers + averages) * self.gather_of(numel, wire.values)
            + changes * self.gather_of(numel, options.wire_of_changes)
        )

    @property
    def levels(self) -> tuple[int, int]:
        """Ranks of a node, and nodes; one level is one node per rank."""
        each = min(self.options.ranks_per_node or 1, self.world_size)
        return each, self.world_size // each

    def row(self, numel: int, wire: Wire) -> int:
        """Bytes of values from one rank to another."""
        return wire.of(torch.float32).num_bytes(numel) + SEAL * self.options.verified

    def sum_of(self, numel: int, wire: Wire) -> int:
        """As wide as gradients accumulate to each rank of the node, then a slice to each node."""
        each, nodes = self.levels
        return (each - 1) * self.row(numel // each, FP32) + (nodes - 1) * self.row(
            numel // self.world_size, wire
        )

    def gather_of(self, numel: int, wire: Wire) -> int:
        """A slice to each node, then those of all nodes to each rank of the node."""
        each, nodes = self.levels
        inside = nodes * wire.of(torch.float32).num_bytes(numel // self.world_size)
        return (nodes - 1) * self.row(numel // self.world_size, wire) + (each - 1) * (
            inside + SEAL * self.options.verified
        )

    def records(self, num_slots: int) -> int:
        """Bytes of small records, to each other rank."""
        ledger = ledger_of(self.strategy)
        reports = 1 if ledger.local else ledger.rounds
        sizes = [record_dtype(num_slots, 0).itemsize] * reports
        # Of the sum of two reductions, for the record of the update.
        sizes += [NORM] * (ledger.rounds > 1)
        if not self.options.verified:
            return sum(sizes)
        phases = ledger.gradient_transfers + ledger.gathers + ledger.sum_transfers
        phases += 2 * int(ledger.outer_steps) + 2 * int(ledger.averages) * ledger.local
        sizes += [MISSING] * phases + [LENGTH]
        return COPIES * sum(size + SEAL for size in sizes)


def cases(wire: str) -> list[Case]:
    """Return random jobs: every strategy on one level and on two."""
    draws = random.Random(wire)
    formats = (None, *WIRES)
    found = []
    for name, has_nodes in part(itertools.product(STRATEGIES, (False, True))):
        world_size, each = draws.choice([shape for shape in NODES if (shape[1] is not None) == has_nodes])
        changes = draws.choice(formats)
        options = stretto.Options(
            wire=wire,
            changes=changes if ledger_of(STRATEGIES[name]()).sends_changes else None,
            ranks_per_node=each,
            hide_reductions=draws.random() < 0.5,
            verified=draws.random() < 0.5,
            bucket_bytes=draws.choice([512, 1024, 4096]),
        )
        found.append(Case(name, world_size, options))
    return found


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("wire", OF_GRADIENTS)
def test_an_update_sends_what_the_ledger_says(wire: str) -> None:
    for case in cases(wire):
        for layout, sent in VirtualCluster(case.world_size).run(case.observed).values:
            assert sent == [case.sent(layout)] * 2, case


def in_one_format(ledger: Ledger, wire: Wire) -> float:
    """Bytes per parameter and update, as the ledger prices a wire."""
    gradient, value = (one.of(torch.float32).num_bytes(ALIGNMENT) / ALIGNMENT for one in (wire, wire.values))
    return ledger.wire_bytes(gradient, value)


@pytest.mark.parametrize("wire", OF_GRADIENTS)
def test_what_is_foretold_of_ranks_that_are_alike_is_the_ledgers_price(wire: str) -> None:
    for name, world_size in itertools.product(STRATEGIES, (1, 2, 3, 4)):
        case = Case(name, world_size, stretto.Options(wire=wire))
        ledger = ledger_of(case.strategy)
        if not ledger.averages or ledger.local:  # of the averages of PAFT the ledger says the most there are
            price = in_one_format(ledger, WIRES[wire]) * 960 * ALIGNMENT  # divided last, so that it is exact
            assert case.volume(960 * ALIGNMENT) == price * (world_size - 1) / world_size, case
