"""The 4-bit wire: gradients in blocks of 64 integers that share a scale, two to a byte, 1/2 + 2/64 bytes per element.

Source: 4-bit gradients with error feedback as in Jia et al., "SDP4Bit: Toward 4-bit Communication Quantization in
Sharded Data Parallelism for LLM Training" and Xie et al., "LoCo: Low-Bit Communication Adaptor".
"""

import torch
from torch import Tensor

from stretto.exchange.blocks import upper_half
from stretto.exchange.integers import IntegerWire
from stretto.exchange.wire import block_scales


class Int4(IntegerWire):
    """Thirty-two bytes, each with two neighbouring integers; a bf16 scale.

    Note [Neighbours]
        A pair of bytes is one int16. So every operation takes a whole tensor, and not a part of each block, which
        doubles the speed of unpacking. Other bits are cut off: when the pair becomes one byte, and by a mask on the
        way back.
    """

    name = "int4"
    block_bytes = 32 + 2
    largest, zero, bits = 7, 8, 4
    word_bits, scale_bits = 16, 8

    def pack(self, blocks: Tensor, packed: Tensor) -> None:
        """Round blocks to integers times their scale."""
        scales = block_scales(blocks, self.largest, self.scale_bits)
        # On a processor torch is four times as fast to int8 as to uint8.
        pairs = (blocks / scales).round_().add_(self.zero).to(torch.int8).view(torch.int16)
        packed[:, :32].copy_(pairs.bitwise_or_(pairs >> 4))
        packed[:, 32:].view(torch.int16).copy_(upper_half(scales))

    def unpack(self, packed: Tensor) -> Tensor:
        """Return integers times their scale."""
        pairs = packed[:, :32].to(torch.int16)
        pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F)
        integers = pairs.view(torch.int8).sub_(self.zero).to(torch.float32)
        return integers.mul_(packed[:, 32:].view(torch.bfloat16).to(torch.float32))
