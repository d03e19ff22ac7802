"""Running statistics where ranks step alone: each rank's own are in their mean, once, whatever comes between."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stretto as st
from stretto_lab.virtual import VirtualCluster
from tests.diloco.jobs import drawn as any_diloco
from tests.draws import seeds

RANKS = 3
UPDATES = 14
ROUNDING = 1e-5
"""A few dozen sums of float32 values below 10, in another order: 20 * 10 * 2**-24, and room."""


def drawn(draw: random.Random) -> st.Strategy:
    """Averages, at once or with a delay, of the whole model or of parts."""
    if draw.random() < 0.3:
        return st.LocalSGD(draw.choice((0.1, 0.5)), max_gap=draw.randint(2, 8))
    return any_diloco(draw.randrange(10**6), longest=8)


def batch_of(rank: int, step: int) -> Tensor:
    """What a rank trains on."""
    return 5 + 3 * torch.randn(16, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def new_job(strategy: st.Strategy, group: Any) -> st.DataParallel:
    """A model with running statistics and a counter of its own kind, which rank 0 alone touches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    model.register_buffer("touched", torch.zeros(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return st.DataParallel(model, optimizer, strategy, group=group, options=st.Options(nonfinite="skip"))


def train(parallel: st.DataParallel, rank: int, step: int, *, is_bad: bool = False) -> None:
    """Make one update."""
    loss = parallel.model(batch_of(rank, step)).square().mean()
    if rank == 0 and step % 3 == 0:
        parallel.model.touched += 1
    parallel.backward(loss * float("nan") if is_bad else loss)


def statistics(model: nn.Module) -> Tensor:
    """All floating-point buffers, one after the other."""
    return torch.cat([buffer.flatten() for buffer in model.buffers() if buffer.is_floating_point()]).clone()


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("seed", seeds(12))
def test_behind_every_update_the_settled_ones_are_the_mean_of_what_ranks_hold(seed: int) -> None:
    strategy = drawn(random.Random(seed))

    def program(rank: int, group: Any) -> list[tuple[Tensor, Tensor]]:
        parallel, found = new_job(strategy, group), []
        for step in range(UPDATES):
            train(parallel, rank, step)
            own = statistics(parallel.model)
            with parallel.settled():
                found.append((own, statistics(parallel.model)))
        parallel.finish()
        return found

    for by_rank in zip(*VirtualCluster(RANKS).run(program).values, strict=True):
        mean = torch.stack([own for own, _ in by_rank]).mean(0)
        for _, settled in by_rank:
            assert (settled - mean).abs().max() < ROUNDING


@pytest.mark.parametrize("seed", seeds(8))
def test_a_round_that_is_left_out_takes_nothing_else_with_it(seed: int) -> None:
    # Until the first average a rank's statistics are those of a model that nobody shares.
    draw = random.Random(seed)
    length = draw.randint(3, UPDATES)
    bad = {draw.randrange(length - 1) for _ in range(draw.randint(1, 2))}
    strategy = draw.choice((st.LocalSGD(0.0, max_gap=length), st.DiLoCo(length)))

    def program(rank: int, group: Any) -> tuple[Tensor, Tensor]:
        parallel = new_job(strategy, group)
        for step in range(length - 1):
            train(parallel, rank, step, is_bad=rank == 1 and step in bad)
        own = statistics(parallel.model)
        train(parallel, rank, length - 1)  # the average
        return own, statistics(parallel.model)

    def alone(rank: int, length: int) -> Tensor:
        model = nn.BatchNorm1d(3)
        for step in range(length):
            if not (rank == 1 and step in bad):
                model(batch_of(rank, step))
        return statistics(model)

    found = VirtualCluster(RANKS).run(program).values
    counts = [length - len(bad) * (rank == 1) for rank in range(RANKS)]
    mean = sum(count * alone(rank, length) for rank, count in enumerate(counts)) / sum(counts)
    for rank, (own, averaged) in enumerate(found):
        assert (own[2:] - alone(rank, length - 1)).abs().max() < ROUNDING
        assert (averaged[2:] - mean).abs().max() < ROUNDING
