"""Sums over ranks, in rank order, and whether such a sum can be right."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_LOOKED_AT, _EVERY = 16, 256
"""Elements of a sum that are looked at, of as many each: one cache line of float32 in sixteen."""
_MANY = 8
"""With more ranks than this, one call per rank costs more than another pass over memory."""


def sum_in_rank_order(contributions: Tensor | Sequence[Tensor], total: Tensor) -> None:
    """Add  ((c_0 + c_1) + c_2) + ...  in the dtype of `total`.

    Terms are added one at a time: torch's `sum(0)` may pair them in another way. NumPy pairs terms only along an
    array's fastest axis, so over the first of two axes it does the same additions, without a call per rank.

    Args:
        contributions: In rank order: `(world_size, numel)`, or `(numel,)` each.
        total: `(numel,)`, overwritten.
    """
    dtype, device = total.dtype, total.device
    is_known = contributions[0].dtype == dtype in (torch.float32, torch.float64) and device.type == "cpu"
    is_large = len(contributions) > _MANY and total.numel() > 1  # the first of two axes is not the fastest
    if isinstance(contributions, Tensor) and is_known and is_large:
        # From −0.0, which changes no first term; NumPy's +0.0 would turn a sum of negative zeros.
        np.add.reduce(contributions.numpy(), axis=0, out=total.numpy(), initial=-0.0)
        return
    first, *others = contributions
    running = first.to(total.dtype)  # no copy where it has it
    for contribution in others:
        running = torch.add(running, contribution, out=total)
    if not others:
        total.copy_(running)


def sampled(values: Tensor) -> Tensor:
    """Return a view of some of `values`, `(n, 16)`, or all where there are few: at least one of any 256 in a row."""
    return values if values.numel() < _LOOKED_AT else values.unfold(0, _LOOKED_AT, _EVERY)


def is_plausible_sum(values: Sequence[Tensor], total: Tensor) -> bool:
    """Return whether a sum lies within its rounding of the sum in float64.

    For every element  |total − Σ v| ≤ n ε Σ |v|  (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2);
    an element that may overflow counts as plausible.

    Args:
        values: The n contributions, in the shape of `total`.
        total: Their sum.
    """
    exact = torch.zeros_like(total, dtype=torch.float64)
    size = torch.zeros_like(exact)
    for value in values:
        exact += value
        size += value.abs()
    numbers = torch.finfo(total.dtype)
    is_near = (total - exact).abs() <= len(values) * numbers.eps * size
    return bool((is_near | ~(size <= numbers.max)).all())
