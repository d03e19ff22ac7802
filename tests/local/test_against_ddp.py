"""At rate 1, with SGD, local steps that are averaged are the synchronous step."""

import pytest
import torch
from torch import Tensor, nn

from stretto import DDP, DataParallel, LocalSGD
from stretto.strategies import Strategy
from tests.processes import run_ranks

UPDATES = 3
LOCAL = LocalSGD(rate=1)


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
        assert [other for other in results[1:] if not torch.equal(results[0], other)] == []
