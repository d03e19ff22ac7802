"""The 4-bit wire: gradients in blocks of 64 integers that share a scale, two to a byte, 1/2 + 2/64 bytes per element.

Source: 4-bit gradients with error feedback as in Jia et al., "SDP4Bit: Toward 4-bit Communication Quantization in
Sharded Data Parallelism for LLM Training" and Xie et al., "LoCo: Low-Bit Communication Adaptor".
"""

import torch
from torch import Tensor

from stretto.exchange.wire import PackedWire, block_scales

_LARGEST = 7
_ZERO = 8
"""What is added to an integer to make it a number from 1 to 15."""


class Int4(PackedWire):
    """Thirty-two bytes, each with an integer of the first half of the block and one of the second; a bf16 scale."""

    name = "int4"
    block = 64
    block_bytes = 32 + 2

    def pack(self, blocks: Tensor, packed: Tensor) -> None:
        """Round blocks to integers times their scale."""
        scales = block_scales(blocks, _LARGEST, bits=8)  # as many as bf16 has
        # On a processor torch is four times as fast to int8 as to uint8, and shifts whole tensors faster than parts.
        numbers = (blocks / scales).round_().add_(_ZERO).to(torch.int8).view(torch.uint8)
        torch.bitwise_or(numbers[:, :32], (numbers << 4)[:, 32:], out=packed[:, :32])
        packed[:, 32:].view(torch.bfloat16).copy_(scales)

    def unpack(self, packed: Tensor) -> Tensor:
        """Return integers times their scale."""
        halves = packed[:, :32]
        numbers = torch.cat([halves & 15, halves >> 4], dim=1).to(torch.float32).sub_(_ZERO)
        return numbers.mul_(packed[:, 32:].view(torch.bfloat16).to(torch.float32))
