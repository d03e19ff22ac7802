"""Ranks that read the same batches are named, once, and no others."""

import logging
import random

import pytest
import torch
from torch import nn

import stretto
from stretto.engine.duplicate_data import MOST_ROUNDS, ROUNDS
from stretto_lab.virtual import VirtualCluster, VirtualGroup
from tests.draws import seeds

STRATEGIES = (stretto.ZeRO1(), stretto.ACCO(), stretto.DDP(), stretto.DPU(), stretto.WeightPrediction())


def train(
    parts: list[int],
    strategy: stretto.Strategy,
    updates: int,
    caplog: pytest.LogCaptureFixture,
    zero_head: int = 0,
) -> list[str]:
    """What is logged where each rank reads the part of the data that `parts` names; a head may stay zero for long."""

    def program(rank: int, group: VirtualGroup) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        if zero_head:
            nn.init.zeros_(model[2].weight)
            nn.init.zeros_(model[2].bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: float(done >= zero_head))
        parallel = stretto.DataParallel(
            model, optimizer, strategy, scheduler=schedule, micro_batches=2, group=group
        )
        draw = torch.Generator().manual_seed(parts[rank])
        data = [
            (torch.randn(5, 4, generator=draw), torch.randint(3, (5,), generator=draw))
            for _ in range(2 * updates)
        ]
        for inputs, classes in parallel.feed(data):
            parallel.backward(nn.functional.cross_entropy(model(inputs), classes))
        parallel.finish()

    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="stretto"):
        VirtualCluster(len(parts)).run(program)
    return [record.getMessage() for record in caplog.records if "same batches" in record.getMessage()]


@pytest.mark.parametrize("seed", seeds(20))
def test_exactly_the_ranks_that_share_their_batches_are_named(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    draw = random.Random(seed)
    parts = [draw.randrange(6) for _ in range(draw.randint(2, 5))]
    alike = [rank for rank, part in enumerate(parts) if parts.count(part) > 1]
    told = train(parts, draw.choice(STRATEGIES), ROUNDS + 3, caplog)
    assert len(told) == bool(alike)
    assert [text for text in told if f"losses of ranks {alike} have been equal" not in text] == []


@pytest.mark.parametrize("zero_head", [3, 12])
@pytest.mark.parametrize("parts", [[0, 1], [0, 0]])
def test_a_loss_that_cannot_differ_says_nothing(
    parts: list[int], zero_head: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A head of zeros has the same loss on every batch, until the first rate above zero."""
    told = train(parts, stretto.ZeRO1(), zero_head + ROUNDS + 2, caplog, zero_head)
    assert zero_head < MOST_ROUNDS
    assert len(told) == (parts == [0, 0])


def test_a_rank_alone_is_not_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    assert train([0], stretto.ZeRO1(), ROUNDS + 2, caplog) == []
