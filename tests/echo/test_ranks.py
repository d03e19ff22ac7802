"""Ranks that decide for themselves: nobody waits for a collective that others do not enter."""

from typing import Any

import pytest
import torch

import stretto
from stretto import Bernoulli, DataParallel, EchoLoader, EchoOptions, Even
from stretto_lab.virtual import VirtualCluster, VirtualGroup


def feed(rank: int, group: VirtualGroup, strategy: str, until: Any) -> tuple[int, list[int], list[float]]:
    """Train with other data, another plan and another length on every rank."""
    length, plan = [(5, Even(2.5)), (13, Bernoulli(0.4))][rank]
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = [torch.full((3, 2), float(number + 1)) for number in range(length)]
    loader = EchoLoader(data, plan, options=EchoOptions(seed=rank))
    parallel = DataParallel(model, optimizer, getattr(stretto, strategy)(), micro_batches=2, group=group)
    uses: list[int] = []
    for batch in parallel.feed(loader, until=until):
        if update := parallel.backward(model(batch).square().mean()):
            uses += update.uses
    for update in parallel.finish():
        uses += update.uses
    return parallel.steps, uses, [float(value) for value in model.weight.detach().flatten()]


@pytest.mark.parametrize("strategy", ["ZeRO1", "ACCO"])
@pytest.mark.parametrize("until", ["any", "all"])
def test_ranks_with_plans_and_lengths_of_their_own_end_together(strategy: str, until: str) -> None:
    # A rank that waited for a collective nobody else enters would be a Deadlock here.
    cluster = VirtualCluster(2, seed=0)
    results = cluster.run(lambda rank, group: feed(rank, group, strategy, until))
    (steps, uses, weights), (other_steps, other_uses, other_weights) = results.values
    assert (steps, weights) == (other_steps, other_weights)
    # 5 batches in updates of two, the first four of them 2.5 times each: 11 uses. The other rank has more, and sees
    # them all only where all must end.
    assert len(uses) == 11
    assert other_uses.count(1) == 13 if until == "all" else len(other_uses) <= 13
    assert uses != other_uses
