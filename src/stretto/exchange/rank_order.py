"""A sum over ranks that every rank, and every replay, computes to the same bits."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_MANY = 8
"""Ranks from which on a call for each of them costs more than one more pass over memory."""
_NUMPY_KNOWS = (torch.float32, torch.float64)


def sum_in_rank_order(contributions: Tensor | Sequence[Tensor], total: Tensor) -> None:
    """Add  ((c_0 + c_1) + c_2) + ...  in the dtype of `total`.

    One addition at a time: torch's `sum(0)` may pair terms differently and would tie the result to the number of
    ranks and the vector width. NumPy pairs terms only along an array's fastest axis, so that over the first of two
    it is this very loop, without a call per rank.

    Args:
        contributions: In rank order: `(world_size, numel)`, or `(numel,)` each.
        total: `(numel,)`, overwritten.
    """
    if isinstance(contributions, Tensor) and len(contributions) > _MANY and _is_known(contributions, total):
        # From −0.0, which changes no first term; NumPy's +0.0 would turn a sum of negative zeros.
        np.add.reduce(contributions.numpy(), axis=0, out=total.numpy(), initial=-0.0)
        return
    first, *others = contributions
    running = first.to(total.dtype)  # no copy where it has it
    for contribution in others:
        running = torch.add(running, contribution, out=total)
    if not others:
        total.copy_(running)


def _is_known(contributions: Tensor, total: Tensor) -> bool:
    """Whether NumPy knows the tensors, and the first of two axes is not the fastest."""
    return (
        contributions.dtype == total.dtype
        and total.dtype in _NUMPY_KNOWS
        and total.device.type == "cpu"
        and total.numel() > 1
    )
