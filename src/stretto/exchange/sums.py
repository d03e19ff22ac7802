"""Whether a sum over ranks can be right."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.checksums import is_on_host

_LOOKED_AT, _EVERY = 16, 256
"""Elements of a sum that are looked at, of as many each: one cache line of float32 in sixteen."""


def sampled(values: Tensor) -> Tensor:
    """Return a view of some of `values`, `(..., n, 16)`, or all where there are few: at least one of any 256 in a row.

    Args:
        values: `(..., numel)`.
    """
    return values if values.size(-1) < _LOOKED_AT else values.unfold(-1, _LOOKED_AT, _EVERY)


def is_plausible_sum(values: Sequence[Tensor] | Tensor, total: Tensor) -> bool | Tensor:
    """Return whether a sum lies within its rounding of the sum in float64; on a device, `()` bool there.

    For every element  |total − Σ v| ≤ n ε Σ |v|  (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2);
    an element that may overflow counts as plausible.

    Args:
        values: The n contributions, in the shape of `total`.
        total: Their sum.
    """
    together = values if isinstance(values, Tensor) else torch.stack(tuple(values))
    numbers, exact = torch.finfo(total.dtype), together.sum(0, dtype=torch.float64)
    size = torch.linalg.vector_norm(together, 1, 0, dtype=torch.float64)
    is_near = (total - exact).abs_() <= size * (len(values) * numbers.eps)
    if is_on_host(total) and is_near.all():
        return True
    is_plausible = (is_near | ~(size <= numbers.max)).all()
    return bool(is_plausible) if is_on_host(total) else is_plausible
