"""The direct exchange: all contributions travel to their owner, who adds them in rank order in float32."""

from collections.abc import Sequence

from torch import Tensor

from stretto.exchange.exchange import Exchange, Transfer
from stretto.exchange.rank_order import sum_in_rank_order
from stretto.exchange.wire import narrower
from stretto.flat import Bucket


class DirectExchange(Exchange):
    """Reduce-scatter as an all-to-all and a sum in rank order.

    The wire volume is a ring's. The result does not depend on the topology, a 16-bit wire still accumulates
    in 32 bits, and the owner sees every contribution by itself. Default on Gloo, whose reduce-scatter costs
    a whole all-reduce.
    """

    def sum_bucket(self, index: int, bucket: Bucket, flat: Tensor, total: Tensor) -> Transfer:
        """See `Exchange.sum_bucket`; a direct sum of the slice, gathered rounded to the wire."""
        numel = bucket.numel // self.world_size
        shard = self.scratch("shard", index, numel, total.dtype, flat.device)
        yield from self.sum_slice(index, bucket, flat, shard)
        dtype = narrower(self.wire, flat.dtype)
        own = shard
        if shard.dtype != dtype:
            own = self.scratch("own", index, numel, dtype, flat.device).copy_(shard)
        yield from self.gather(own, total, index, f"gather of summed bucket {index}")

    def sum_slice(self, index: int, bucket: Bucket, flat: Tensor, total: Tensor) -> Transfer:
        """See `Exchange.sum_slice`."""
        outgoing = self.outgoing(flat, bucket, index, narrower(self.wire, flat.dtype))
        received = self.scratch("received", index, bucket.numel, outgoing.dtype, flat.device)
        self.sent_bytes += outgoing.nbytes // self.world_size * (self.world_size - 1)
        yield self.group.alltoall_base(received, outgoing, [], []), f"reduction of bucket {index}"
        self.add_up(received.view(self.world_size, -1), total)

    def add_up(self, contributions: Tensor | Sequence[Tensor], total: Tensor) -> None:
        """Write the sum of `contributions`, one per rank, into `total`, in its dtype."""
        sum_in_rank_order(contributions, total)
