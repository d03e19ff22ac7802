"""Looking at a model without touching it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from stretto.recipes.task import Batch, Loss


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every module has the mode that it had."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode  # not `train()`, which would also turn the modules below


def mean_loss(model: nn.Module, batches: Iterable[Batch], loss: Callable[[nn.Module, Batch], Loss]) -> float:
    """The weighted mean of `loss` over `batches`: `sum(weight * value) / sum(weight)`, summed in float64."""
    with evaluating(model):
        losses = [loss(model, batch) for batch in batches]
    return sum(one.weight * one.value.item() for one in losses) / sum(one.weight for one in losses)
