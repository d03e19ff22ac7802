"""`commit` ends an update where the user's loop ends it, under every strategy, and leaves nothing in flight."""

import functools

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

import stretto
from stretto import ACCO, DDP, DPU, Clock, ZeRO1, errors
from stretto.strategies import STRATEGIES, Strategy
from stretto_lab.virtual import VirtualCluster

LENGTHS = (4, 1, 3, 4, 2)
"""Micro-batches of each update; four are a full one."""
EVERY = [pytest.param(kind(), id=name) for name, kind in STRATEGIES.items()]


def data(rank: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return list(torch.randn(count, 2, 3, generator=generator, dtype=torch.float64))


def parts() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2, dtype=torch.float64)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def committing(
    rank: int, group: dist.ProcessGroup, strategy: Strategy
) -> tuple[list[stretto.Update], Tensor]:
    """Train one rank, commit after each of `LENGTHS`, and return the updates and the parameters."""
    model, optimizer = parts()
    parallel = stretto.DataParallel(model, optimizer, strategy, micro_batches=4, group=group)
    batches, updates = iter(data(rank, sum(LENGTHS))), []
    for count in LENGTHS:
        for _ in range(count):
            updates += filter(None, [parallel.backward(model(next(batches)).square().mean())])
        updates += parallel.commit()
        assert parallel.commit() == []  # nothing is under way, so nothing is sent
        parallel.state_dict()  # an error in the middle of an update
    assert parallel.finish() == []
    return updates, model.weight.detach().clone()


@pytest.mark.parametrize("strategy", EVERY)
def test_every_commit_makes_one_update_of_what_was_counted(strategy: Strategy) -> None:
    results = VirtualCluster(2).run(functools.partial(committing, strategy=strategy))
    for updates, _ in results.values:
        assert [update.step for update in updates] == [1, 2, 3, 4, 5]
        if not any(
            update.gap for update in updates
        ):  # ranks that step alone report later, for several updates
            assert [update.micro_batches for update in updates] == [(count, count) for count in LENGTHS]


@pytest.mark.parametrize("strategy", [ZeRO1(), DDP(), ACCO(), DPU()], ids=lambda strategy: strategy.name)
def test_what_lands_at_once_is_exact(strategy: Strategy) -> None:
    """No gradient is taken at an estimate or applied late, so all four equal a plain loop but for rounding.

    Sums in float64 differ in their order: 28 additions of numbers below 10, so by less than 1e-13.
    """
    weights = [
        weight for _, weight in VirtualCluster(2).run(functools.partial(committing, strategy=strategy)).values
    ]
    model, optimizer = parts()
    ranks = [iter(data(rank, sum(LENGTHS))) for rank in range(2)]
    for count in LENGTHS:
        for batches in ranks:
            for _ in range(count):
                (model(next(batches)).square().mean() / (2 * count)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weight in weights:
        torch.testing.assert_close(weight, model.weight.detach(), rtol=0, atol=1e-13)


def test_commit_inside_feed_does_not_end_it() -> None:
    model, optimizer = parts()
    parallel = stretto.DataParallel(model, optimizer, ACCO(), micro_batches=4)
    for index, batch in enumerate(parallel.feed(data(0, 9))):
        parallel.backward(model(batch).square().mean())
        if index == 4:
            parallel.commit()
    assert index == 8
    assert parallel.steps == 3


def test_a_clock_lets_nobody_commit_while_a_round_is_in_flight() -> None:
    model, optimizer = parts()
    parallel = stretto.DataParallel(model, optimizer, ACCO(), micro_batches=Clock(minimum=2))
    for batch in data(0, 3):
        parallel.backward(model(batch).square().mean())
    with pytest.raises(errors.OutOfTurn, match=r"commit\(\) while a round is in flight, under a Clock"):
        parallel.commit()
