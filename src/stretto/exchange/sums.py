"""Whether a sum over ranks can be right."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from stretto.checksums import is_on_host

_LOOKED_AT, _EVERY = 16, 256
"""Elements of a sum that are looked at, of as many each: one cache line of float32 in sixteen."""
_TOGETHER = 2**14
"""Elements that are looked at together: those of a million."""


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
    is_plausible = _plausible(together, total).all()
    return bool(is_plausible) if is_on_host(total) else is_plausible


def _plausible(together: Tensor, total: Tensor) -> Tensor:
    """Return for each element of `total` whether it is a plausible sum over the first dimension of `together`."""
    numbers, exact = torch.finfo(total.dtype), together.sum(0, dtype=torch.float64)
    size = torch.linalg.vector_norm(together, 1, 0, dtype=torch.float64)
    is_near = (total - exact).abs_() <= size * (len(together) * numbers.eps)
    return is_near | ~(size <= numbers.max)


Summed = tuple[int, str]
"""A sum: the index of its transfer, and the level, as messages call it."""


class Samples:
    """Samples of sums of one phase, looked at many at a time: a small one costs the host as much as a large one."""

    def __init__(self) -> None:
        self._held: list[tuple[Summed, Tensor, Tensor]] = []
        self._numel = 0

    def add(self, key: Summed, values: Tensor, total: Tensor) -> Iterator[tuple[list[Summed], Tensor]]:
        """Take samples of contributions, `(n, numel)`, and of their sum; yield what `look` does, if there is much."""
        some, few = sampled(values), sampled(total)
        if self._held and (some.shape, total.dtype) != (self._held[0][1].shape, self._held[0][2].dtype):
            yield from self.look()
        self._held.append((key, some.clone(), few.clone()))
        self._numel += few.numel()
        if self._numel >= _TOGETHER:
            yield from self.look()

    def look(self) -> Iterator[tuple[list[Summed], Tensor]]:
        """Yield the keys of samples taken since, and whether their sums are plausible, `(keys,)` bool."""
        if self._held:
            keys, some, few = zip(*self._held, strict=True)
            is_plausible = _plausible(torch.stack(some, 1), torch.stack(few))
            yield list(keys), is_plausible.flatten(1).all(1)
        self._held, self._numel = [], 0
