"""Operations of packed formats on blocks, with the same bits on every device."""

import torch
from torch import Tensor

_SIDE_BY_SIDE = 8
# Number of blocks in a row above which they cost more than the row's rotation.
_LONG = 512


def upper_half(scales: Tensor) -> Tensor:
    """Return the bits of bf16 scales, `(n, 1)` int16, stored as float32; the result is a view."""
    return scales.view(torch.int16)[:, 1:]


def block_sums(blocks: Tensor) -> Tensor:
    """Return the sum of each block, `(n, 1)`: halves are added to each other, so that bits are the same on any device.

    The last eight sums of all blocks are side by side, because operations on a few neighbours are slow.
    """
    while blocks.shape[1] > _SIDE_BY_SIDE:
        first, second = blocks.chunk(2, 1)
        blocks = first + second
    sums = blocks.t().contiguous()
    while len(sums) > 1:
        first, second = sums.chunk(2)
        sums = first + second
    return sums.view(-1, 1)


def rotations(uniform: Tensor, signs: Tensor, hadamard: Tensor) -> Tensor:
    """Return R = Q D H for each row of `signs`, `(rows, 64, 64)`; exact, see `stretto.exchange.rotated`."""
    turned = (uniform * signs.unsqueeze(1)).view(-1, len(hadamard))
    return torch.mm(turned, hadamard, out=torch.empty_like(turned)).view(len(signs), *hadamard.shape)


def turned_back(levels: Tensor, uniform: Tensor, signs: Tensor, hadamard: Tensor, out: Tensor) -> Tensor:
    """Write Rᵀ q of rows of blocks into `out`: with R if rows are long, otherwise with one product by Q and one by H.

    Args:
        levels: q, `(n, 64)`; overwritten.
        uniform: Q.
        signs: The diagonals of D, by row.
        hadamard: H.
        out: Tensor of the same size as `levels`.
    """
    shape = len(signs), len(levels) // len(signs), len(hadamard)
    # With `out` a user's autocast does not apply.
    if shape[1] >= _LONG:
        torch.bmm(levels.view(shape), rotations(uniform, signs, hadamard), out=out.view(shape))
        return out
    torch.mm(levels, uniform, out=out)
    torch.mul(out.view(shape), signs.unsqueeze(1), out=levels.view(shape))
    return torch.mm(levels, hadamard, out=out)
