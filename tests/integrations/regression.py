"""A regression of a few dozen parameters: cheap enough for a hundred trainings in one test."""

from typing import Any

import torch
from torch import Tensor, nn


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


class Regression(nn.Module):
    """With its loss inside, as the Trainer of transformers likes it; the same every time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = {"logits": self.layers(x)}
        if labels is not None:
            outputs = {"loss": (outputs["logits"].squeeze(-1) - labels).square().mean(), **outputs}
        return outputs


def inputs(count: int) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(5))


def samples(count: int = 24) -> list[dict[str, Tensor]]:
    return [{"x": row, "labels": row.sum()} for row in inputs(count)]


def values(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    """The largest difference of any two elements."""
    return max(float((left - right).abs().max()) for left, right in zip(one, other, strict=True))


def said(attempt: Any) -> str:
    """Return what an attempt raises, with its kind."""
    try:
        attempt()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
