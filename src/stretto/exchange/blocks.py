"""What packed formats make of blocks, with the same bits on every device."""

import torch
from torch import Tensor

_SIDE_BY_SIDE = 8


def upper_half(scales: Tensor) -> Tensor:
    """Return the bits of bf16 scales, `(n, 1)` of int16, that are stored as float32: a view."""
    return scales.view(torch.int16)[:, 1:]


def block_sums(blocks: Tensor) -> Tensor:
    """Return the sum of each block, `(n, 1)`: halves are added to each other, so that bits are the same on any device.

    The last eight sums of all blocks lie side by side, because operations on a few neighbours are slow.
    """
    while blocks.shape[1] > _SIDE_BY_SIDE:
        first, second = blocks.chunk(2, 1)
        blocks = first + second
    sums = blocks.t().contiguous()
    while len(sums) > 1:
        first, second = sums.chunk(2)
        sums = first + second
    return sums.view(-1, 1)
