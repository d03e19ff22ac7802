"""Checks whether a sum over ranks can be right."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stretto.checksums import is_on_host

# Number of elements that are checked in each group of so many: one cache line of float32 in sixteen.
_LOOKED_AT, _EVERY = 16, 256


class Terms:
    """The terms of a sum over ranks, `(ranks, numel)` in rank order: all, by rank, and a sample for checks."""

    def __init__(self, values: Tensor) -> None:
        self.values, self.by_rank, self.sampled = values, values.unbind(), sampled(values)


def sampled(values: Tensor) -> Tensor:
    """Return a view of some of `values`, `(..., n, 16)`, or all of few values: at least one in any 256 consecutive
    ones.

    Args:
        values: `(..., numel)`.
    """
    return values if values.size(-1) < _LOOKED_AT else values.unfold(-1, _LOOKED_AT, _EVERY)


def is_plausible_sum(values: Tensor, total: Tensor) -> bool | Tensor:
    """Return whether a sum is within its rounding of the sum in float64; on a device, `()` bool there.

    For every element  |total − Σ v| ≤ n ε Σ |v|  (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2);
    an element that may overflow counts as plausible.

    Args:
        values: The n contributions, `(n, ...)`, each in the shape of `total`.
        total: Their sum.
    """
    largest, rounding = torch.finfo(total.dtype).max, len(values) * torch.finfo(total.dtype).eps
    terms, found = _wide(values), _wide(total)
    with np.errstate(all="ignore"):
        size = abs(terms).sum(0)
        is_plausible = ((abs(found - terms.sum(0)) <= size * rounding) | ~(size <= largest)).all()
    return bool(is_plausible) if is_on_host(total) else is_plausible


def _wide(values: Tensor) -> Any:
    """Return values in float64; on the host as a NumPy array, whose calls are shorter."""
    if is_on_host(values) and values.dtype == torch.float32:
        return values.numpy().astype(np.float64)
    wide = values.to(torch.float64)
    return wide.numpy() if is_on_host(wide) else wide
