"""The 2-bit wire: blocks of 64 numbers -1, 0 or 1 that share a scale, four to a byte, 1/4 + 2/64 bytes per element.

Source: three levels with error feedback as in Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in
Distributed Deep Learning", rounded to the nearest instead of at random, which feedback needs.
"""

import torch
from torch import Tensor

from stretto.exchange.wire import PackedWire, block_scales


class Int2(PackedWire):
    """Sixteen bytes, each with four numbers that are neighbours, as in `Int4`; a bf16 scale."""

    name = "int2"
    block = 64
    block_bytes = 16 + 2

    def pack(self, blocks: Tensor, packed: Tensor) -> None:
        """Round blocks to numbers times their scale."""
        scales = block_scales(blocks, 1, bits=8)  # as many as bf16 has
        # To int8: on a processor torch is four times as fast to that as to uint8.
        fours = (blocks / scales).round_().add_(1).to(torch.int8).view(torch.int32)
        fours.bitwise_or_(fours >> 6)  # two numbers in the lowest byte, two in the third
        packed[:, :16].copy_(fours.bitwise_or_(fours >> 12))
        packed[:, 16:].view(torch.bfloat16).copy_(scales)

    def unpack(self, packed: Tensor) -> Tensor:
        """Return numbers times their scale."""
        fours = packed[:, :16].to(torch.int32)
        fours.bitwise_or_(fours << 12)
        fours.bitwise_or_(fours << 6).bitwise_and_(0x03030303)
        numbers = fours.view(torch.int8).sub_(1).to(torch.float32)
        return numbers.mul_(packed[:, 16:].view(torch.bfloat16).to(torch.float32))
