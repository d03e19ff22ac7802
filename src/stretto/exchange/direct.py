"""The direct exchange: all contributions travel to their owner, who adds them in rank order in float32."""

from collections.abc import Sequence

from torch import Tensor

from stretto.exchange.exchange import Exchange, Transfer
from stretto.exchange.wire import narrower
from stretto.flat import Bucket


class DirectExchange(Exchange):
    """Reduce-scatter as an all-to-all and a sum in rank order.

    The wire volume is a ring's. The result does not depend on the topology, a 16-bit wire still accumulates
    in 32 bits, and the owner sees every contribution by itself. Default on Gloo, whose reduce-scatter costs
    a whole all-reduce.
    """

    def reduce_scatter(self, flats: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """See `Exchange.reduce_scatter`."""
        self.perform(
            self._sum(index, bucket, flats[bucket.set_index], total)
            for index, (bucket, total) in enumerate(zip(self.layout.buckets, sums, strict=True))
        )

    def all_reduce(self, flats: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """See `Exchange.all_reduce`; a direct reduce-scatter, and a gather of the sums rounded to the wire."""
        self.perform(
            self._sum_and_gather(index, bucket, flats[bucket.set_index], total)
            for index, (bucket, total) in enumerate(zip(self.layout.buckets, sums, strict=True))
        )

    def _sum_and_gather(self, index: int, bucket: Bucket, flat: Tensor, total: Tensor) -> Transfer:
        numel = bucket.numel // self.world_size
        shard = self.scratch("shard", index, numel, total.dtype, flat.device)
        yield from self._sum(index, bucket, flat, shard)
        dtype = narrower(self.wire, flat.dtype)
        own = shard
        if shard.dtype != dtype:
            own = self.scratch("own", index, numel, dtype, flat.device).copy_(shard)
        yield from self.gather(own, total, index, f"gather of summed bucket {index}")

    def _sum(self, index: int, bucket: Bucket, flat: Tensor, total: Tensor) -> Transfer:
        outgoing = self.outgoing(flat, bucket, index, narrower(self.wire, flat.dtype))
        received = self.scratch("received", index, bucket.numel, outgoing.dtype, flat.device)
        self.sent_bytes += outgoing.nbytes // self.world_size * (self.world_size - 1)
        yield self.group.alltoall_base(received, outgoing, [], []), f"reduction of bucket {index}"
        contributions = received.view(self.world_size, -1)
        # Rank order, one addition at a time: `sum(0)` may pair terms differently and would tie the result
        # to the number of ranks and the vector width.
        total.copy_(contributions[0])
        for contribution in contributions[1:]:
            total.add_(contribution)
