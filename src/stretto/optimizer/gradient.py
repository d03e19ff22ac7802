"""A reduced gradient as the ranks hold it: weighted sums, one float32 tensor per bucket."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.errors import ConfigError


class ReducedGradient:
    """The sum over ranks of weighted gradients, on the slices this rank owns.

    Note [One division]
        Gradients travel as Σ w·g. The division by Σ w, and the clip, happen once: in place at `Step`
        (`become_mean`), out of place and piece by piece at a `Preview` that comes earlier (`mean_of`), so
        that no second copy of the sums is ever held and both see the same values.
    """

    def __init__(self, sums: Sequence[Tensor], weight: float, norm_squared: float, used: bytes) -> None:
        self.sums = sums
        """One float32 tensor per bucket, over this rank's owned slice."""
        self.weight = weight
        """Σ w over ranks; zero means that nobody contributed."""
        self.norm_squared: float | None = norm_squared
        """Squared 2-norm of the whole sum; None until measured."""
        self.used = used
        """One byte per parameter slot: did any rank's micro-batch use it?"""
        self._parts: tuple[ReducedGradient, ReducedGradient] | None = None
        self._spent = False
        self._scale: float | None = None

    def __add__(self, other: "ReducedGradient") -> "ReducedGradient":
        """Return the sum; it takes over the storage of `other` once `merge` is called."""
        used = bytes(a | b for a, b in zip(self.used, other.used, strict=True))
        total = ReducedGradient(other.sums, self.weight + other.weight, 0.0, used)
        total.norm_squared = None
        total._parts = (self, other)
        return total

    def merge(self) -> None:
        """Perform pending additions, in place: a third buffer would cost four bytes per owned element.

        Raises:
            ConfigError: The strategy uses a gradient again whose storage has gone into a sum, or been divided.
        """
        if self._spent:
            raise ConfigError(
                "a strategy used a gradient again that it had added to another: pass on the sum itself"
            )
        if self._parts is None:
            return
        for part in self._parts:
            part.merge()
            if part._scale is not None:
                raise ConfigError(
                    "a strategy added a gradient that it had stepped with: add first, then step"
                )
            part._spent = True
        addend, into = self._parts
        for total, piece in zip(into.sums, addend.sums, strict=True):
            total.add_(piece)
        self._parts = None

    def become_mean(self, clip: float) -> None:
        """Divide the sums by the weight and multiply by `clip`, in place, once."""
        if self._scale is None:
            for total in self.sums:
                _scaled(total.div_(self.weight), clip)
            self._scale = clip

    def mean_of(self, piece: Tensor, clip: float) -> Tensor:
        """Return the mean of one `piece` of the sums; a copy unless `become_mean` has been there already."""
        return piece if self._scale is not None else _scaled(piece.div(self.weight), clip)

    def measure(self) -> float:
        """Return the squared 2-norm of the sums on this rank's slices.

        In float64, where squares of all float32 values are neither too large nor too small.
        """
        norms = (float(torch.linalg.vector_norm(total, dtype=torch.float64)) for total in self.sums)
        return sum(norm * norm for norm in norms)


def _scaled(mean: Tensor, clip: float) -> Tensor:
    """Multiply in place, unless nothing is clipped: one pass over memory less, beside a busy compute lane."""
    return mean if clip == 1.0 else mean.mul_(clip)
