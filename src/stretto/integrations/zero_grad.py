"""Trainers call `zero_grad` after a step, when a job has zeroed its gradients and may hold those of the next update."""

from collections.abc import Iterable

import torch
from torch import nn

Owner = nn.Module | torch.optim.Optimizer


def disarm(owners: Iterable[Owner]) -> None:
    """Let `zero_grad` of models and optimizers do nothing."""
    for owner in owners:
        vars(owner)["zero_grad"] = _leave_gradients  # past the setters of compiled models


def arm(owners: Iterable[Owner]) -> None:
    """Give them back their own."""
    for owner in owners:
        vars(owner).pop("zero_grad", None)


def _leave_gradients(set_to_none: bool = True) -> None:
    """Stand for `zero_grad`."""
