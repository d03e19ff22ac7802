"""Tensors that should be equal to the bit: which of them are not, and by how much."""

from collections.abc import Iterable

import torch
from torch import Tensor


def unequal(found: Iterable[Tensor], expected: Iterable[Tensor]) -> list[str]:
    """Return what differs, tensor by tensor; an empty list where all bits are equal."""
    differences = []
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one.shape != other.shape or one.dtype != other.dtype:
            differences.append(
                f"{index}: {one.dtype} {tuple(one.shape)}, not {other.dtype} {tuple(other.shape)}"
            )
        elif not torch.equal(one, other):
            apart = (one.detach().double() - other.detach().double()).abs()
            differences.append(
                f"{index}: {int((apart != 0).sum())} of {apart.numel()} off, by up to {float(apart.max()):.3g}"
            )
    return differences
