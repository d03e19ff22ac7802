"""One rank's call of a collective: what all ranks must agree on, and what each one brings."""

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from stretto.virtual.network import Pattern


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """What every rank must say alike of one collective."""

    operation: str
    dtypes: tuple[str, ...]
    numels: tuple[int, ...]
    """Elements of every tensor that a rank brings; empty where ranks may bring different numbers."""
    root: int | None = None
    reduction: str | None = None

    def __str__(self) -> str:
        sizes = ", ".join(str(numel) for numel in self.numels)
        parts = [
            self.operation,
            f"of {sizes} elements" if self.numels else "",
            f"in {', '.join(dict.fromkeys(self.dtypes))}" if self.dtypes else "",
            f"with root {self.root}" if self.root is not None else "",
            f"by {self.reduction}" if self.reduction is not None else "",
        ]
        return " ".join(part for part in parts if part)


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One rank's part of one collective."""

    terms: Terms
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    sent_bytes: int
    pattern: Pattern
    input_splits: Sequence[int] = ()
    """Rows for every rank; empty for equal parts."""
    output_splits: Sequence[int] = ()
    """Rows from every rank; empty for equal parts."""


def terms(
    operation: str, tensors: Sequence[Tensor], root: int | None = None, reduction: str | None = None
) -> Terms:
    """Return the terms of a collective to which every rank brings tensors of equal sizes."""
    return Terms(
        operation,
        tuple([str(tensor.dtype).removeprefix("torch.") for tensor in tensors]),
        tuple([tensor.numel() for tensor in tensors]),
        root,
        reduction,
    )
