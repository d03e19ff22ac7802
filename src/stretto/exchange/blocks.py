"""Blocks of 8-bit integers that share a scale.

    s = max |x| / 127 over a block,   q = round(x / s),   x ≈ s·q,   |x - s·q| ≤ s / 2

A packed row is the integers of its blocks, then their scales in float32: 1 + 4/64 bytes per element.
"""

import torch
from torch import Tensor

from stretto.flat import ALIGNMENT

BLOCK = ALIGNMENT
"""Elements that share a scale; every slice is a multiple of it."""
_LARGEST = 127
_TINY = torch.finfo(torch.float32).tiny


def packed_bytes(numel: int) -> int:
    """Return the bytes of a packed row of `numel` elements, a multiple of `BLOCK`."""
    return numel + numel // BLOCK * torch.float32.itemsize


def pack(values: Tensor, packed: Tensor) -> None:
    """Pack rows, and leave in `values` what was lost.

    Args:
        values: `(rows, numel)`, float32, contiguous; overwritten with the rounding error. A block with a value
            that is not finite unpacks to NaN and loses nothing that could be kept: its error is zero.
        packed: `(rows, packed_bytes(numel))`, uint8; overwritten.
    """
    rows, numel = values.shape
    blocks = values.view(rows, -1, BLOCK)
    scales = torch.linalg.vector_norm(blocks, torch.inf, dim=-1) / _LARGEST
    integers = blocks.div(scales.clamp_min(_TINY).unsqueeze(-1)).round_()
    packed[:, :numel].view(torch.int8).copy_(integers.view(rows, numel))
    packed[:, numel:].view(torch.float32).copy_(scales)
    blocks.sub_(integers.mul_(scales.unsqueeze(-1)))
    blocks.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def unpack(packed: Tensor) -> Tensor:
    """Return the values, `(numel,)` in float32, of one packed row."""
    blocks = packed.numel() // packed_bytes(BLOCK)
    numel = blocks * BLOCK
    scales = packed[numel:].view(torch.float32)
    return packed[:numel].view(torch.int8).view(blocks, BLOCK).mul(scales.unsqueeze(-1)).view(numel)
