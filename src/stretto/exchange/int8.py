"""The 8-bit exchange: gradients in blocks of 8-bit integers with error feedback, parameters in bf16."""

import torch
from torch import Tensor
from torch import distributed as dist

from stretto.exchange.blocks import pack, packed_bytes, unpack
from stretto.exchange.direct import DirectExchange
from stretto.exchange.exchange import Transfer, Wait
from stretto.flat import Bucket, Layout


class Int8Exchange(DirectExchange):
    """A direct exchange whose contributions take a good byte per element.

        send q(g_t + e_t),   e_{t+1} = g_t + e_t - q(g_t + e_t)

    What rounding takes from a contribution goes with the next one, so nothing is lost but time. Owners unpack and
    sum in float32. Parameters, and the sums of an all-reduce, travel as bf16: they are published afresh every time,
    so an error of theirs would not average out.

    Memory: 4 bytes per parameter for the errors e, on every rank.
    Source: Seide et al., "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
    Training of Speech DNNs" (error feedback); blocks with a scale each as in Dettmers et al., "8-bit Optimizers via
    Block-wise Quantization".
    """

    def __init__(self, group: dist.ProcessGroup, layout: Layout, wait: Wait) -> None:
        super().__init__(group, layout, torch.bfloat16, wait)
        self.owed = [torch.zeros(flat.numel, dtype=torch.float32, device=flat.device) for flat in layout.sets]

    def sum_slice(self, index: int, bucket: Bucket, flat: Tensor, total: Tensor) -> Transfer:
        """See `Exchange.sum_slice`."""
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
