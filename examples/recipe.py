"""A recipe of one's own: one function in one file.

    stretto train examples/recipe.py:sine --updates 200 --task.hidden 64

What stands after the star are options of the command line, and the docstring is their help. See docs/recipes.md.
"""

import math

import torch
from torch import Tensor, nn

from stretto_lab.recipes import Loss, MicroBatches, Task
from stretto_lab.recipes.task import MeanLoss


class Points:
    """Points on the line, collected by index."""

    def __init__(self, places: Tensor) -> None:
        self.places = places

    def __len__(self) -> int:
        return len(self.places)

    def batch(self, indices: Tensor) -> Tensor:
        return self.places[indices]


def sine(
    rank: int,
    world_size: int,
    seed: int,
    updates: int | None,
    *,
    hidden: int = 32,
    batch: int = 32,
    lr: float = 0.01,
) -> Task:
    """A small network learns one period of the sine.

    Args:
        rank: This rank, from 0.
        world_size: Number of ranks that share the points.
        seed: Decides the first parameters and the order of the points.
        updates: Length of the run; matters to schedules only.
        hidden: Units of the hidden layer.
        batch: Points per micro-batch.
        lr: Learning rate.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, 1))
    places = torch.linspace(-1, 1, 1024).unsqueeze(1)
    return Task(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=lr),
        scheduler=None,
        loader=MicroBatches(Points(places[::2]), batch, rank=rank, world_size=world_size, seed=seed),
        loss=sine_loss,
        evaluate=MeanLoss([places[1::2]], sine_loss),
    )


def sine_loss(model: nn.Module, places: Tensor) -> Loss:
    """Mean squared error, with weight 1."""
    return Loss(nn.functional.mse_loss(model(places), torch.sin(math.pi * places)), 1.0, len(places))
