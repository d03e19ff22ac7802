"""A reduced gradient as the ranks hold it: weighted sums, one float32 tensor per bucket."""

from collections.abc import Sequence

from torch import Tensor


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
        self._pending: ReducedGradient | None = None
        self._scale: float | None = None

    def __add__(self, other: "ReducedGradient") -> "ReducedGradient":
        """Return the sum; it takes over the storage of `other` once `merge` is called."""
        used = bytes(a | b for a, b in zip(self.used, other.used, strict=True))
        total = ReducedGradient(other.sums, self.weight + other.weight, 0.0, used)
        total.norm_squared = None
        total._pending = self
        return total

    def merge(self) -> None:
        """Perform a pending addition, in place: a third buffer would cost four bytes per owned element."""
        if self._pending is not None:
            for into, part in zip(self.sums, self._pending.sums, strict=True):
                into.add_(part)
            self._pending = None

    def become_mean(self, clip: float) -> None:
        """Divide the sums by the weight and multiply by `clip`, in place, once."""
        if self._scale is None:
            for total in self.sums:
                total.div_(self.weight).mul_(clip)
            self._scale = clip

    def mean_of(self, piece: Tensor, clip: float) -> Tensor:
        """Return the mean of one `piece` of the sums; a copy unless `become_mean` has been there already."""
        return piece if self._scale is not None else piece.div(self.weight).mul_(clip)

    def measure(self) -> float:
        """Return the squared 2-norm of the sums on this rank's slices."""
        return sum(float(total.norm()) ** 2 for total in self.sums)
