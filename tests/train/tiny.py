"""A task that trains in milliseconds, with all that a resume could lose: momentum, schedule, dropout, BatchNorm."""

import dataclasses
import random
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from stretto_lab.recipes import Loss, MicroBatches, Task


class Points(NamedTuple):
    """Points of the plane and the quadrant that each lies in."""

    places: Tensor
    quadrants: Tensor


class Plane:
    """A fixed set of points."""

    def __init__(self, count: int, seed: int) -> None:
        self.places = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
        self.quadrants = (self.places[:, 0] > 0).long() + 2 * (self.places[:, 1] > 0).long()

    def __len__(self) -> int:
        return len(self.places)

    def batch(self, indices: Tensor) -> Points:
        return Points(self.places[indices], self.quadrants[indices])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tiny:
    """Options of the task."""

    lr: float = 0.01
    """Learning rate at the start."""

    dropout: float = 0.1
    """Share of the hidden values left out."""

    width: int = 16
    """Hidden values."""

    normed: bool = True
    """Whether there is batch normalisation."""

    batch: int = 8
    """Points per micro-batch."""

    def build(self, rank: int, world_size: int, seed: int, updates: int | None) -> Task:
        """See `TaskConfig.build`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = nn.Sequential(
                nn.Linear(2, self.width),
                nn.BatchNorm1d(self.width) if self.normed else nn.Identity(),
                nn.Tanh(),
                nn.Dropout(self.dropout),
                nn.Linear(self.width, 4),
            )
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.lr, foreach=True)
        everywhere = Plane(64, seed=1)
        return Task(
            model=model,
            optimizer=optimizer,
            scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.97**done),
            loader=MicroBatches(Plane(512, seed=0), self.batch, rank=rank, world_size=world_size, seed=seed),
            loss=quadrant_loss,
            evaluate=partial(heldout_loss, points=Points(everywhere.places, everywhere.quadrants)),
        )


def quadrant_loss(model: nn.Module, points: Points) -> Loss:
    return Loss(functional.cross_entropy(model(points.places), points.quadrants), 1.0, len(points.places))


@torch.no_grad()
def heldout_loss(model: nn.Module, points: Points) -> float:
    # An evaluation that draws, to show that the run does not notice.
    torch.rand(1), np.random.random(), random.random()
    model.eval()
    loss = float(quadrant_loss(model, points).value)
    model.train()
    return loss
