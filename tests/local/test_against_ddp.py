"""At rate 1, with SGD, local steps that are averaged are the synchronous step."""

import functools

import pytest
import torch
from torch import Tensor, nn

from stretto import DDP, DataParallel, LocalSGD
from stretto.strategies import Strategy
from tests.exactness.jobs import Case, Observed, train_all
from tests.processes import run_ranks

UPDATES = 3
LOCAL = LocalSGD(rate=1)
CASES = [
    Case(strategy=strategy, optimizer="sgd", tokens=tokens, lengths=(16,))
    for tokens in (False, True)
    for strategy in (DDP(), LOCAL)
]


def train_exactly(rank: int, strategy: Strategy, dtype: torch.dtype) -> Tensor:
    """Train on small integers with dyadic rates: a few bits more per update, none of them ever rounded in float32."""
    generator = torch.Generator().manual_seed(rank)
    model = nn.Linear(4, 2, bias=False).to(dtype)
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    parallel = DataParallel(model, optimizer, strategy, micro_batches=1)
    for _ in range(UPDATES):
        x = torch.randint(0, 2, (2, 4), generator=generator).to(dtype)
        y = torch.randint(-1, 2, (2, 2), generator=generator).to(dtype)
        parallel.backward((model(x) - y).square().mean())
    parallel.finish()
    return model.weight.detach().double()


def train_both(rank: int) -> list[Tensor]:
    return [
        train_exactly(rank, strategy, dtype)
        for strategy in (DDP(), LOCAL, LocalSGD(rate=1, state=True))
        for dtype in (torch.float32, torch.float64)
    ]


@pytest.mark.parametrize("world_size", [2, 4])
def test_rate_one_equals_ddp_to_the_bit_where_nothing_is_rounded(world_size: int) -> None:
    for results in run_ranks(world_size, train_both):
        assert not torch.equal(results[0], torch.ones(2, 4).double())
        assert all(torch.equal(results[0], other) for other in results[1:])


@functools.cache
def observed() -> list[list[Observed]]:
    return run_ranks(2, train_all, CASES)


@pytest.mark.parametrize("pair", [0, 2], ids=["equal weights", "token weights"])
def test_rate_one_equals_ddp_up_to_rounding(pair: int) -> None:
    """(θ - η·g_a)·ω_a + (θ - η·g_b)·ω_b and θ - η·(ω_a·g_a + ω_b·g_b) are one number, rounded otherwise.

    Per element and update each side rounds at most six times, to 2^-24 of something no larger than 2·max|θ|. Four
    updates add up, and each carries the deviation of the parameters on through the next gradients, by less than a
    factor of 2 at this learning rate: 2 · 6 · 2 · (1 + 2 + 4 + 8) < 2^9 units of 2^-24·max|θ|.
    """
    for found in observed():
        ddp, local = (found[pair + i].final for i in range(2))
        largest = max(float(value.abs().max()) for value in ddp)
        for ours, theirs in zip(local, ddp, strict=True):
            assert float((ours - theirs).abs().max()) <= 2**9 * 2**-24 * largest


def test_weights_count_in_the_average() -> None:
    equal, weighted = (observed()[0][i].final for i in (1, 3))
    assert not all(map(torch.equal, equal, weighted))
