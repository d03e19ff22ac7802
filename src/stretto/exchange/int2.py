"""The 2-bit wire: blocks of 64 numbers -1, 0 or 1 that share a scale, four to a byte, 1/4 + 2/64 bytes per element.

Source: three levels with error feedback as in Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in
Distributed Deep Learning", rounded to the nearest instead of at random, which feedback needs.
"""

import torch
from torch import Tensor

from stretto.exchange.wire import PackedWire, block_scales

_QUARTER = 16


class Int2(PackedWire):
    """Sixteen bytes, each with a number of every quarter of the block; a bf16 scale."""

    name = "int2"
    block = 64
    block_bytes = _QUARTER + 2

    def pack(self, blocks: Tensor, packed: Tensor) -> None:
        """Round blocks to numbers times their scale."""
        scales = block_scales(blocks, 1, bits=8)  # as many as bf16 has
        # To int8 first: on a processor torch is four times as fast to that as to uint8.
        numbers = (blocks / scales).round_().add_(1).to(torch.int8).view(torch.uint8)
        first, second, third, fourth = numbers.split(_QUARTER, dim=1)
        torch.bitwise_or(first | second << 2, third << 4 | fourth << 6, out=packed[:, :_QUARTER])
        packed[:, _QUARTER:].view(torch.bfloat16).copy_(scales)

    def unpack(self, packed: Tensor) -> Tensor:
        """Return numbers times their scale."""
        quarters = packed[:, :_QUARTER]
        parts = [quarters >> shift & 3 for shift in (0, 2, 4, 6)]
        numbers = torch.cat(parts, dim=1).to(torch.float32).sub_(1)
        return numbers.mul_(packed[:, _QUARTER:].view(torch.bfloat16).to(torch.float32))
