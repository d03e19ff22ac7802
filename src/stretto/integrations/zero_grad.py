"""Trainers call `zero_grad` after a step, when a job has zeroed its gradients and may hold those of the next update."""

from collections.abc import Iterable

import torch
from torch import nn

from stretto.engine.method_patch import MethodPatch

Owner = nn.Module | torch.optim.Optimizer


def disarm(owners: Iterable[Owner]) -> None:
    """Let `zero_grad` of models and optimizers do nothing; copies of them have their own."""
    for owner in owners:
        arm([owner])
        MethodPatch(owner, "zero_grad", _leave_gradients)


def arm(owners: Iterable[Owner]) -> None:
    """Give them back their own."""
    for owner in owners:
        stands = vars(owner).get("zero_grad")
        if isinstance(stands, MethodPatch):
            stands.remove()


def _leave_gradients(set_to_none: bool = True) -> None:
    """Stand for `zero_grad`."""
