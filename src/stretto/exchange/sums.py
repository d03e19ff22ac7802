"""Two exchanges that differ in who adds the gradients: their owner, or the backend.

In the direct exchange, all contributions travel to their owner, who adds them in rank order in float32, so that every
rank and every replay gets the same bits. The native exchange uses the backend's own reduce-scatter and all-reduce.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from stretto.exchange.exchange import Exchange, Transfer, narrower
from stretto.flat import Bucket

_MANY = 8
"""With more ranks than this, one call per rank costs more than another pass over memory."""
_NUMPY_KNOWS = (torch.float32, torch.float64)


def sum_in_rank_order(contributions: Tensor | Sequence[Tensor], total: Tensor) -> None:
    """Add  ((c_0 + c_1) + c_2) + ...  in the dtype of `total`.

    Terms are added one at a time: torch's `sum(0)` may pair them in another way, which depends on the number of ranks
    and the vector width. NumPy pairs terms only along an array's fastest axis, so over the first of two axes it does
    the same additions as this loop, without a call per rank.

    Args:
        contributions: In rank order: `(world_size, numel)`, or `(numel,)` each.
        total: `(numel,)`, overwritten.
    """
    if isinstance(contributions, Tensor) and len(contributions) > _MANY and _is_known(contributions, total):
        # From −0.0, which changes no first term; NumPy's +0.0 would turn a sum of negative zeros.
        np.add.reduce(contributions.numpy(), axis=0, out=total.numpy(), initial=-0.0)
        return
    first, *others = contributions
    running = first.to(total.dtype)  # no copy where it has it
    for contribution in others:
        running = torch.add(running, contribution, out=total)
    if not others:
        total.copy_(running)


def _is_known(contributions: Tensor, total: Tensor) -> bool:
    """Return whether NumPy supports the tensors, and the first of two axes is not the fastest."""
    return (
        contributions.dtype == total.dtype
        and total.dtype in _NUMPY_KNOWS
        and total.device.type == "cpu"
        and total.numel() > 1
    )


class DirectExchange(Exchange):
    """Reduce-scatter as an all-to-all and a sum in rank order.

    The wire volume is a ring's. The result does not depend on the topology, a 16-bit wire still accumulates
    in 32 bits, and the owner sees every contribution by itself. Default on Gloo, whose reduce-scatter costs
    a whole all-reduce.
    """

    def sum_bucket(
        self, index: int, bucket: Bucket, flat: Tensor, total: Tensor, wire: torch.dtype | None = None
    ) -> Transfer:
        """Sum this rank's slice of a bucket directly, then gather all slices, rounded to the wire."""
        numel = bucket.numel // self.world_size
        shard = self.scratch("shard", index, numel, total.dtype, flat.device)
        yield from self.sum_slice(index, bucket, flat, shard, wire)
        dtype = narrower(wire or self.wire, flat.dtype)
        own = shard
        if shard.dtype != dtype:
            own = self.scratch("own", index, numel, dtype, flat.device).copy_(shard)
        yield from self.gather(own, total, index, f"gather of summed bucket {index}")

    def sum_slice(
        self, index: int, bucket: Bucket, flat: Tensor, total: Tensor, wire: torch.dtype | None = None
    ) -> Transfer:
        """Send a bucket's slices to their owners, and add those of this rank in rank order."""
        outgoing = self.outgoing(flat, bucket, index, narrower(wire or self.wire, flat.dtype))
        received = self.scratch("received", index, bucket.numel, outgoing.dtype, flat.device)
        self.sent_bytes += outgoing.nbytes // self.world_size * (self.world_size - 1)
        yield self.group.alltoall_base(received, outgoing, [], []), f"reduction of bucket {index}"
        self.add_up(received.view(self.world_size, -1), total)

    def add_up(self, contributions: Tensor | Sequence[Tensor], total: Tensor) -> None:
        """Write the sum of `contributions`, one per rank, into `total`, in its dtype."""
        sum_in_rank_order(contributions, total)


class NativeExchange(Exchange):
    """Leaves the sum to the backend (NCCL's ring or tree), in the wire's precision.

    The wire dtype is taken as asked for, also where the buffer is narrower: there the backend's partial sums
    gain from the extra bits.
    """

    def sum_slice(
        self, index: int, bucket: Bucket, flat: Tensor, total: Tensor, wire: torch.dtype | None = None
    ) -> Transfer:
        """Sum this rank's slice of a bucket with the backend's reduce-scatter."""
        wire = wire or self.wire
        outgoing = self.outgoing(flat, bucket, index, wire)
        same = total.dtype == wire
        out = total if same else self.scratch("own", index, total.numel(), wire, total.device)
        self.sent_bytes += outgoing.nbytes // self.world_size * (self.world_size - 1)
        work = self.group.reduce_scatter_single(out, outgoing, dist.ReduceScatterOptions())
        yield work, f"reduction of bucket {index}"
        if not same:
            total.copy_(out)

    def sum_bucket(
        self, index: int, bucket: Bucket, flat: Tensor, total: Tensor, wire: torch.dtype | None = None
    ) -> Transfer:
        """Sum a whole bucket with the backend's all-reduce."""
        wire = wire or self.wire
        outgoing = self.outgoing(flat, bucket, index, wire)
        self.sent_bytes += 2 * (outgoing.nbytes // self.world_size) * (self.world_size - 1)
        yield self.group.allreduce([outgoing]), f"reduction of bucket {index}"
        total.copy_(outgoing)
