"""Checkpoints work inside: a saved run goes on to the bit, and saving changes nothing."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from stretto import ACCO, DDP, DataParallel, WeightPrediction, checkpoint
from stretto.groups import Link
from stretto.strategies import Strategy
from stretto_lab.virtual import Network, VirtualCluster, VirtualGroup
from tests.bits import unequal

MICRO_BATCHES = 4
NETWORK = Network(link=Link(bits_per_second=1e8, latency_seconds=1e-3))


def run(strategy: Strategy, folder: Path, *, save_at: int | None, resume: bool) -> list[list[Tensor]]:
    def program(rank: int, group: VirtualGroup) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.2), nn.Linear(9, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
        torch.manual_seed(100 + rank)  # dropout differs between ranks
        with DataParallel(model, optimizer, strategy, micro_batches=MICRO_BATCHES, group=group) as parallel:
            first = checkpoint.load(parallel, folder).extra if resume else 0
            for index in range(first, 8 * MICRO_BATCHES):
                batch = torch.randn(3, 6, generator=torch.Generator().manual_seed(1000 * rank + index))
                update = parallel.backward(model(batch).square().mean())
                if update is not None and update.step == save_at:
                    checkpoint.save(parallel, folder, extra=index + 1)
            parallel.finish()
        return [parameter.detach().clone() for parameter in model.parameters()]

    return list(VirtualCluster(3, network=NETWORK, seed=int(resume)).run(program).values)


@pytest.mark.parametrize("strategy", [DDP(), WeightPrediction(), ACCO()], ids=lambda strategy: strategy.name)
def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_interrupted(
    strategy: Strategy, tmp_path: Path
) -> None:
    plain = run(strategy, tmp_path, save_at=None, resume=False)
    saved = run(strategy, tmp_path, save_at=3, resume=False)
    resumed = run(strategy, tmp_path, save_at=None, resume=True)
    for rank in range(3):
        assert unequal(plain[rank], saved[rank]) == []
        assert unequal(plain[rank], resumed[rank]) == []
