"""The 2-bit wire: blocks of 64 numbers -1, 0 or 1 that share a scale, four to a byte, 1/4 + 2/64 bytes per element.

Note [Two scales]
    A block x is sent as s·q, where q is x / s, rounded to -1, 0 or 1.

        gradients, changes    s = max |x|
        averages              s = Σ x² / Σ |x|,   so that mean |x| ≤ s ≤ max |x|

    Of the sum of squares of normally distributed values, the first scale loses a half and the second one 0.19; the
    best scale of each block would lose 0.18. Averages of replicas learn better with the second one. Gradients do not
    (benchmarks/results/2026-11-25-two-scales).

    With the second scale some values are larger than s. They arrive as s, and error feedback brings the rest. No value
    is above 4.5·s, so errors are exact in float32. At least 1/64 of Σ x² arrives, so errors do not grow.

Source: three levels with error feedback as in Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in
Distributed Deep Learning", rounded to the nearest instead of at random, which feedback needs.
"""

import torch
from torch import Tensor

from stretto.exchange.blocks import block_sums, upper_half
from stretto.exchange.integers import IntegerWire
from stretto.exchange.wire import PackedWire, block_scales, short


class Int2(IntegerWire):
    """Sixteen bytes, each with four neighbouring numbers, as in `Int4`; a bf16 scale."""

    name = "int2"
    fits_gradients = False
    block_bytes = 16 + 2
    largest, zero, bits = 1, 1, 2
    word_bits, scale_bits = 16, 8

    @property
    def for_averages(self) -> PackedWire:
        """A format of the same size with the other scale; see Note [Two scales]."""
        return AveragedInt2()

    def pack(self, blocks: Tensor, packed: Tensor) -> None:
        """Round blocks to numbers times their scale."""
        scales = block_scales(blocks, self.largest, self.scale_bits)
        _write((blocks / scales).round_(), scales, packed)

    def unpack(self, packed: Tensor) -> Tensor:
        """Return numbers times their scale."""
        fours = packed[:, :16].to(torch.int32)
        fours.bitwise_or_(fours << 12)
        fours.bitwise_or_(fours << 6).bitwise_and_(0x03030303)
        numbers = fours.view(torch.int8).sub_(1).to(torch.float32)
        return numbers.mul_(packed[:, 16:].view(torch.bfloat16).to(torch.float32))


class AveragedInt2(Int2):
    """A format of the same size that is read in the same way, with the scale for averages."""

    of_mean = True

    def pack(self, blocks: Tensor, packed: Tensor) -> None:
        """Round blocks to numbers times their scale; a larger value arrives as the scale."""
        tiny = torch.finfo(torch.float32).tiny
        sizes = blocks.abs()
        largest = sizes.amax(-1, keepdim=True).clamp_min_(tiny)
        sizes.div_(largest)  # so that neither their sum nor their squares overflow
        sums = block_sums(sizes).clamp_min_(1)  # it is less where all are below `tiny`
        squares = block_sums(sizes.square_())
        scales = short(squares.div_(sums).mul_(largest).clamp_min_(tiny), self.scale_bits)
        _write(torch.div(blocks, scales, out=sizes).round_().clamp_(-1, 1), scales, packed)


def _write(numbers: Tensor, scales: Tensor, packed: Tensor) -> None:
    """Write numbers from -1 to 1, which are overwritten, four to a byte, and a scale for each block."""
    # To int8: on a processor torch is four times as fast to that as to uint8.
    fours = numbers.add_(1).to(torch.int8).view(torch.int32)
    fours.bitwise_or_(fours >> 6)  # two numbers in the lowest byte, two in the third
    packed[:, :16].copy_(fours.bitwise_or_(fours >> 12))
    packed[:, 16:].view(torch.int16).copy_(upper_half(scales))
