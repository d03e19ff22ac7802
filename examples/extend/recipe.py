"""A recipe of one's own: one file, and one line that registers it with the command line.

    python examples/extend/recipe.py train sine --updates 200 --task.hidden 64

Every field of the configuration is an option of the command line, and its docstring the help.
"""

import dataclasses
import math
from functools import partial

import torch
from torch import Tensor, nn

from stretto.cli import main
from stretto.recipes import RECIPES, Loss, MicroBatches, Task
from stretto.recipes.task import mean_loss


@dataclasses.dataclass(frozen=True, slots=True)
class Points:
    """Points on the line, collected by index."""

    places: Tensor

    def __len__(self) -> int:
        return len(self.places)

    def batch(self, indices: Tensor) -> Tensor:
        return self.places[indices]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sine:
    """Options of the recipe `sine`: a small network learns one period of the sine."""

    hidden: int = 32
    """Units of the hidden layer."""

    batch: int = 32
    """Points per micro-batch."""

    lr: float = 0.01
    """Learning rate."""

    def build(self, rank: int, world_size: int, seed: int, updates: int | None) -> Task:
        """Build model, optimizer and this rank's share of the points; `updates` matters to schedules only."""
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(1, self.hidden), nn.Tanh(), nn.Linear(self.hidden, 1))
        places = torch.linspace(-1, 1, 1024).unsqueeze(1)
        return Task(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=self.lr),
            scheduler=None,
            loader=MicroBatches(Points(places[::2]), self.batch, rank=rank, world_size=world_size, seed=seed),
            loss=sine_loss,
            evaluate=partial(mean_loss, batches=[places[1::2]], loss=sine_loss),
        )


def sine_loss(model: nn.Module, places: Tensor) -> Loss:
    """Mean squared error, with weight 1."""
    return Loss(nn.functional.mse_loss(model(places), torch.sin(math.pi * places)), 1.0, len(places))


RECIPES["sine"] = Sine  # the line of registration

if __name__ == "__main__":
    raise SystemExit(main())
