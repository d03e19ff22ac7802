"""`local` is Algorithm 2 to the bit: every replica after every step, every average, every end."""

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stretto import DDP, DiLoCo, LocalSGD
from stretto.strategies.local import Pace
from stretto_lab.testing import differing
from stretto_lab.virtual import VirtualCluster
from tests.diloco.jobs import RATE, UPDATES, Naive, on_cluster
from tests.draws import seeds
from tests.exactness.jobs import Case, Observed, train

OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    functools.partial(torch.optim.SGD, lr=RATE, momentum=0.9),
    functools.partial(torch.optim.AdamW, lr=RATE),
]


def drawn(seed: int, draw: random.Random) -> LocalSGD:
    if seed % 3 == 0:
        return LocalSGD(0, max_gap=draw.choice([2, 3]))
    plan: Any = draw.choice(["even", "bernoulli"])
    state, cap = draw.random() < 0.5, draw.choice([None, 4])
    return LocalSGD(draw.choice([0.4, 0.5, 1]), plan=plan, state=state, seed=3, max_gap=cap)


def averages(strategy: LocalSGD) -> list[bool]:
    """Whether each round ends with an average."""
    pace, gap, found = Pace(strategy.rate, strategy.plan, strategy.seed), 0, []
    for index in range(UPDATES):
        gap += 1
        is_due = pace.is_due(index) or gap == strategy.max_gap
        gap = 0 if is_due else gap
        found.append(is_due)
    return found


@pytest.mark.parametrize("seed", seeds(24))
def test_every_replica_is_the_naive_algorithm_to_the_bit(seed: int) -> None:
    draw = random.Random(seed)
    strategy, ranks, optimizer = drawn(seed, draw), draw.randint(1, 4), draw.choice(OPTIMIZERS)
    due = averages(strategy)
    mean = DiLoCo(interval=1, outer_lr=1.0, outer_momentum=0.0)
    expected = Naive(mean, ranks, optimizer, due.__getitem__, state=strategy.state).run()
    for rank, course in enumerate(on_cluster(strategy, ranks, optimizer=optimizer)):
        assert differing([of_ranks[rank] for of_ranks in expected], course.shown, f"rank {rank}") == []
        assert [update.gap == 0 for update in course.updates] == due


def observed(case: Case, ranks: int) -> tuple[Observed, ...]:
    return VirtualCluster(ranks).run(lambda rank, group: train(rank, case, group)).values


def test_what_all_ranks_have_done_is_reported_once_it_is_known() -> None:
    local, ddp = (
        observed(Case(strategy=one, tokens=True, lengths=(23,)), 2) for one in (LocalSGD(rate=0.4), DDP())
    )
    for ours, theirs in zip(local, ddp, strict=True):
        told = max(update.step for update in ours.updates if update.gap == 0)
        reported = [sum(update.samples for update in one.updates[:told]) for one in (ours, theirs)]
        assert reported[0] == reported[1]
        assert ours.updates[0].samples == 3 + 4 + 5 + 6  # of this rank alone


def test_rate_one_reports_what_ddp_reports() -> None:
    local, ddp = (
        observed(Case(strategy=one, tokens=True, lengths=(23,)), 2)[0].updates
        for one in (LocalSGD(rate=1), DDP())
    )
    for ours, theirs in zip(local, ddp, strict=True):
        assert (ours.step, ours.samples, ours.weight, ours.micro_batches, ours.gap) == (
            theirs.step, theirs.samples, theirs.weight, theirs.micro_batches, 0
        )  # fmt: skip
    assert local[0].loss == ddp[0].loss  # later ones are taken at other parameters: this is AdamW
