"""The 8-bit wire: gradients in blocks of 64 integers that share a scale, 1 + 4/64 bytes per element.

Source: blocks with a scale each as in Dettmers et al., "8-bit Optimizers via Block-wise Quantization".
"""

import torch
from torch import Tensor

from stretto.exchange.integers import IntegerWire
from stretto.exchange.wire import block_scales


class Int8(IntegerWire):
    """Sixty-four 8-bit integers, then their scale in float32."""

    name = "int8"
    block_bytes = 64 + 4
    largest, zero, bits = 127, 0, 8
    word_bits, scale_bits = 32, 16

    def pack(self, blocks: Tensor, packed: Tensor) -> None:
        """Round blocks to integers times their scale."""
        scales = block_scales(blocks, self.largest, self.scale_bits)
        packed[:, :64].view(torch.int8).copy_((blocks / scales).round_())
        packed[:, 64:].view(torch.float32).copy_(scales)

    def unpack(self, packed: Tensor) -> Tensor:
        """Return integers times their scale."""
        return packed[:, :64].view(torch.int8) * packed[:, 64:].view(torch.float32)
