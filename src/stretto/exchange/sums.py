"""Whether a sum over ranks can be right."""

from collections.abc import Sequence

import torch
from torch import Tensor

_LOOKED_AT, _EVERY = 16, 256
"""Elements of a sum that are looked at, of as many each: one cache line of float32 in sixteen."""


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
