"""Replaces `zero_grad`, which trainers call after a step, when a job's gradients may belong to the next update."""

from collections.abc import Iterable

import torch
from torch import nn

from stretto.engine.method_patch import MethodPatch

Owner = nn.Module | torch.optim.Optimizer


def disarm(owners: Iterable[Owner]) -> None:
    """Replace `zero_grad` of models and optimizers by a function that does nothing; copies of them keep their own."""
    for owner in owners:
        arm([owner])
        MethodPatch(owner, "zero_grad", _leave_gradients)


def arm(owners: Iterable[Owner]) -> None:
    """Restore their `zero_grad`."""
    for owner in owners:
        stands = vars(owner).get("zero_grad")
        if isinstance(stands, MethodPatch):
            stands.remove()


def _leave_gradients(set_to_none: bool = True) -> None:
    """Do nothing in place of `zero_grad`."""
