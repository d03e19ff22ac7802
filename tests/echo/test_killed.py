"""Two workers killed between two uses of a batch go on with that batch: the same samples, decisions and bits."""

import os
import signal
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import stretto
from stretto import DataParallel, EchoLoader, EchoOptions, Even, checkpoint
from stretto_lab.recipes import MicroBatches
from tests.processes import rank_outcomes, run_ranks

USES = 3
BATCHES = 24


class Line:
    """Points of the real line, augmented as they are read: alike at every reading if `seeded`, else at random."""

    def __init__(self, *, seeded: bool) -> None:
        self.seeded = seeded

    def __len__(self) -> int:
        return 64

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        places = torch.stack([indices / len(self), torch.ones(len(indices))], dim=1)
        draws = torch.Generator().manual_seed(int(indices[0])) if self.seeded else None
        return {"places": places + 0.1 * torch.randn(places.shape, generator=draws), "numbers": indices}


class Run(NamedTuple):
    """What one rank did."""

    used: list[tuple[int, int, int, list[int]]]
    """Step, batch, use index and sample numbers of every batch that this process was handed."""
    weights: bytes


def train(rank: int, folder: str, strategy: str, seeded: bool, dies_at: int | None = None) -> Run:
    """Train, with a checkpoint after every update, from the last one on; rank 1 kills itself at a use of a batch."""
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    # Read on the training thread, which shares its random state, which checkpoints hold, with the dropout.
    options = EchoOptions(ahead=0)
    data = MicroBatches(Line(seeded=seeded), 4, rank=rank, world_size=2, seed=0)
    loader = EchoLoader(data, Even(USES), options=options)
    used = []
    with DataParallel(model, optimizer, getattr(stretto, strategy)(), micro_batches=2) as parallel:
        if checkpoint.latest(folder) is not None:
            checkpoint.load(parallel, folder, loader=loader)
        for batch in parallel.feed(loader):
            used.append((loader.steps, loader.batch_index, loader.use_index, batch["numbers"].tolist()))
            if rank == 1 and loader.steps == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if parallel.backward(model(batch["places"]).square().mean()):
                checkpoint.save(parallel, folder, loader=loader)
            if loader.steps == BATCHES:
                break
        parallel.finish()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return Run(used, weights.numpy().tobytes())


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "seeded", "dies_at"),
    [("ZeRO1", True, 5), ("ACCO", True, 6), ("ZeRO1", False, 9)],
)
def test_a_job_killed_between_two_uses_of_a_batch_goes_on_with_that_batch(
    strategy: str, seeded: bool, dies_at: int
) -> None:
    whole = run_ranks(2, train, "whole", strategy, seeded)
    survivor, killed = rank_outcomes(2, train, "killed", strategy, seeded, dies_at)
    assert "PeerFailed" in survivor.error
    assert killed.error == f"the process ended with exit code -{signal.SIGKILL} and no result"
    again = run_ranks(2, train, "killed", strategy, seeded)
    for uninterrupted, resumed in zip(whole, again, strict=True):
        step, _, use, _ = resumed.used[0]
        assert use > 1
        assert resumed.used == uninterrupted.used[step - 1 :]
        # A batch that is read again is augmented again: at random, it is another one.
        assert (resumed.weights == uninterrupted.weights) == seeded
