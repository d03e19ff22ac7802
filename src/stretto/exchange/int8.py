"""The 8-bit exchange: gradients in blocks of 8-bit integers with error feedback, parameters in bf16.

The elements of a block share a scale s:

    s = max |x| / 127 over a block,   q = round(x / s),   x ≈ s·q,   |x - s·q| ≤ s / 2

A packed row is the integers of its blocks, then their scales in float32: 1 + 4/64 bytes per element.
"""

import torch
from torch import Tensor
from torch import distributed as dist

from stretto.exchange.exchange import Transfer, Wait
from stretto.exchange.sums import DirectExchange
from stretto.flat import ALIGNMENT, Bucket, Layout

BLOCK = ALIGNMENT
"""Elements that share a scale; every slice is a multiple of it."""
_LARGEST = 127
_TINY = torch.finfo(torch.float32).tiny


def packed_bytes(numel: int) -> int:
    """Return the bytes of a packed row of `numel` elements, a multiple of `BLOCK`."""
    return numel + numel // BLOCK * torch.float32.itemsize


def pack(values: Tensor, packed: Tensor) -> None:
    """Pack rows, and leave the rounding error in `values`.

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


class Int8Exchange(DirectExchange):
    """A direct exchange whose contributions take slightly more than one byte per element.

        send q(g_t + e_t),   e_{t+1} = g_t + e_t - q(g_t + e_t)

    The rounding error e of a contribution is sent with the next one, so that it is only delayed and not lost. Owners
    unpack and sum in float32. Parameters, and the sums of an all-reduce, travel as bf16: they have no next
    contribution that could carry their error.

    Memory: 4 bytes per parameter for the errors e, on every rank.
    Source: Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
    Training of Speech DNNs" (error feedback); blocks with a scale each as in Dettmers et al., "8-bit Optimizers via
    Block-wise Quantization".
    """

    def __init__(self, group: dist.ProcessGroup, layout: Layout, wait: Wait) -> None:
        super().__init__(group, layout, torch.bfloat16, wait)
        self.owed = [torch.zeros(flat.numel, dtype=torch.float32, device=flat.device) for flat in layout.sets]

    def sum_slice(
        self, index: int, bucket: Bucket, flat: Tensor, total: Tensor, wire: torch.dtype | None = None
    ) -> Transfer:
        """Sum a bucket's 8-bit contributions into this rank's slice, with error feedback.

        Values that are not gradients travel in `wire` instead, without error feedback.
        """
        if wire is not None:
            yield from super().sum_slice(index, bucket, flat, total, wire)
            return
        values = self.owed[bucket.set_index][bucket.start : bucket.stop]
        values.add_(flat[bucket.start : bucket.stop])
        row_bytes = packed_bytes(total.numel())
        size = self.world_size * row_bytes
        outgoing = self.scratch("outgoing", index, size, torch.uint8, flat.device)
        pack(values.view(self.world_size, -1), outgoing.view(self.world_size, -1))
        received = self.scratch("received", index, size, torch.uint8, flat.device)
        self.sent_bytes += row_bytes * (self.world_size - 1)
        yield self.group.alltoall_base(received, outgoing, [], []), f"reduction of bucket {index}"
        self.add_up([unpack(row) for row in received.view(self.world_size, -1)], total)
