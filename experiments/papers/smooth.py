"""A smooth function whose minimum is known, so that the bounds of ACCO's Propositions 3.1 and 3.2 are numbers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from stretto_lab.recipes.task import Loss, Task

SMOOTHNESS = 2.0
"""Of t² / (1 + t²), whose second derivative lies between -1/2 and 2."""


class Function(nn.Module):
    """f(θ) = Σ θᵢ² / (1 + θᵢ²), which is not convex; it adds up ‖∇f‖² where it is differentiated."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.point = nn.Parameter(start.clone())
        self.squares, self.passes = 0.0, 0

    def forward(self, noise: Tensor) -> Tensor:
        """Return f and a linear term, whose gradient is the noise."""
        at = self.point.detach().double()
        self.squares += float((2 * at / (1 + at**2) ** 2).square().sum())
        self.passes += 1
        return value(self.point) + noise @ self.point


def value(at: Tensor) -> Tensor:
    """Return f."""
    return (at**2 / (1 + at**2)).sum()


class Draws:
    """Noise of a gradient, one draw a micro-batch."""

    def __init__(self, size: int, deviation: float, seed: int) -> None:
        self.size, self.deviation, self.generator = size, deviation, torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield self.deviation * torch.randn(self.size, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the draws."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.generator.set_state(state["generator"])


@dataclass(frozen=True, kw_only=True)
class Smooth:
    """SGD on f; the held-out loss is the mean of ‖∇f(θ)‖² + ‖∇f(θ̃)‖² over the proposition's bound."""

    loss_unit: ClassVar[str] = "times the bound"

    size: int = 100
    """Coordinates."""
    lr: float = 1 / (2 * SMOOTHNESS)
    """The step η; the propositions allow 1/(2L)."""
    noise: float = 0.0
    """Variance σ² of a gradient, over all coordinates; 0 is Proposition 3.1."""

    def build(self, rank: int, world_size: int, seed: int, updates: int | None) -> Task:
        """Build the task of one rank."""
        start = 2 * torch.randn(self.size, generator=torch.Generator().manual_seed(seed))
        model = Function(start)

        def met(_: nn.Module) -> float:
            steps = max(1, model.passes // 2)
            mean = model.squares / steps
            # Both propositions from equal starts; the minimum of f is zero.
            bound = (
                16 / (self.lr * steps) * float(value(start.double())) + 8 * self.noise * SMOOTHNESS * self.lr
            )
            return mean / bound

        return Task(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=self.lr),
            scheduler=None,
            loader=Draws(self.size, (self.noise / self.size) ** 0.5, 1000 * seed + rank),
            loss=lambda model, noise: Loss(model(noise), 1.0, 1),
            evaluate=met,
        )
