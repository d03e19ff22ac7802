"""Statistics of the model travel beside gradients, in float32; `tests/exchange/test_traffic.py` counts all the rest."""

import pytest
import torch
from torch import nn
from torch.distributed import ProcessGroup

from stretto import DataParallel
from stretto.strategies import Strategy
from stretto.strategies.ledger import ledger_of
from stretto_lab.virtual import VirtualCluster
from tests.exactness.jobs import STRATEGIES

WIDTH = 7


def sent(strategy: Strategy, first: nn.Module, world_size: int) -> set[int]:
    """Return what rank 0 sends with an update."""

    def program(rank: int, group: ProcessGroup) -> set[int]:
        model = nn.Sequential(first, nn.Linear(WIDTH, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parallel = DataParallel(model, optimizer, strategy, micro_batches=2, group=group)
        updates = [parallel.backward(model(torch.randn(3, WIDTH)).sum()) for _ in range(8)]
        parallel.finish()
        return {update.sent_bytes for update in updates if update is not None}

    return VirtualCluster(world_size).run(program).values[0]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_every_round_sends_the_statistics_once_to_every_other_rank(
    strategy: Strategy, world_size: int
) -> None:
    (bare,) = sent(strategy, nn.Identity(), world_size)
    (found,) = sent(strategy, nn.BatchNorm1d(WIDTH, affine=False), world_size)
    # Mean and variance, and a byte with each that says what has become of it.
    assert found - bare == ledger_of(strategy).rounds * 2 * (4 * WIDTH + 1) * (world_size - 1)
