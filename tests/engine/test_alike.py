"""What the agreement says of replicas is so: where they are united, they are equal to the bit."""

import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto
from stretto.engine.replica_sync import SyncState
from stretto.optimizer import piece_states
from stretto.strategies import Strategy
from stretto_lab.virtual import VirtualCluster
from tests.draws import seeds

WORLD_SIZE = 3


def drawn(seed: int) -> Strategy:
    """Return a strategy of a random kind, with random settings."""
    draw = random.Random(seed)
    interval, fragments = draw.randint(2, 4), draw.choice((1, 2))
    diloco = stretto.DiLoCo(
        interval=interval,
        fragments=fragments,
        delay=draw.randrange(interval // fragments),
        mix=draw.choice((0.0, 0.3)),
    )
    local = stretto.LocalSGD(rate=draw.choice((0.3, 0.5, 1.0)), state=draw.random() < 0.5)
    paft = stretto.PAFTSync(interval=interval, state=draw.random() < 0.5, overlap=draw.random() < 0.5)
    return draw.choice((stretto.DDP(), diloco, diloco, local, paft))


def held(
    parallel: stretto.DataParallel, model: nn.Module
) -> tuple[SyncState, bool, list[Tensor], list[Any], list[Tensor]]:
    """Return what the agreement says, and masters, optimizer state and model of this rank."""
    job = parallel.job
    agreement = job.replica.sync
    job.replica.wait_for_transfers()
    states = [
        (key, value.clone() if isinstance(value, Tensor) else value)
        for _, entries in piece_states(job.sharded)
        for key, value in sorted(entries.items())
    ]
    return (
        agreement.state,
        agreement.is_whole,
        [master.clone() for master in job.sharded.masters],
        states,
        [parameter.detach().clone() for parameter in model.parameters()],
    )


def are_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(are_same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("seed", seeds(24))
def test_replicas_that_are_united_are_equal(seed: int) -> None:
    strategy = drawn(seed)

    def program(rank: int, group: Any) -> list[tuple[Any, ...]]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
        parallel = stretto.DataParallel(model, optimizer, strategy, group=group)
        generator, found = torch.Generator().manual_seed(100 * seed + rank), []
        for _ in parallel.feed(range(13)):
            parallel.backward(model(torch.randn(4, 6, generator=generator)).square().mean())
            found.append(held(parallel, model))
        parallel.finish()
        return [*found, held(parallel, model)]

    ranks = VirtualCluster(WORLD_SIZE, seed=seed).run(program).values
    for moments in zip(*ranks, strict=True):
        for one, other in pairwise(moments):
            (state, is_whole, masters, states, model), theirs = one, other
            if state is not theirs[0]:
                continue  # this rank is a round ahead of that one
            if state in (SyncState.SYNCED, SyncState.AHEAD):
                assert are_same(masters, theirs[2]), strategy
            if is_whole:
                assert are_same(states, theirs[3]), strategy
            if state is SyncState.SYNCED:
                assert are_same(model, theirs[4]), strategy
    assert [moments for moments in ranks if moments[-1][0] is not SyncState.SYNCED] == []
