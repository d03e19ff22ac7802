"""The native exchange: the backend's own reduce-scatter and all-reduce."""

from collections.abc import Sequence

from torch import Tensor
from torch import distributed as dist

from stretto.exchange.exchange import Exchange


class NativeExchange(Exchange):
    """Leaves the sum to the backend (NCCL's ring or tree), in the wire's precision.

    The wire dtype is taken as asked for, also where the buffer is narrower: there the backend's partial sums
    gain from the extra bits.
    """

    def reduce_scatter(self, flats: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """See `Exchange.reduce_scatter`."""
        for index, (bucket, total) in enumerate(zip(self.layout.buckets, sums, strict=True)):
            outgoing = self.outgoing(flats[bucket.set_index], bucket, self.wire)
            same = total.dtype == self.wire
            out = total if same else self.scratch("own", total.numel(), self.wire, total.device)
            self.wait(
                self.group.reduce_scatter_single(out, outgoing, dist.ReduceScatterOptions()),
                f"reduction of bucket {index}",
            )
            self.sent_bytes += outgoing.nbytes // self.world_size * (self.world_size - 1)
            if not same:
                total.copy_(out)

    def all_reduce(self, flats: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """See `Exchange.all_reduce`."""
        for index, (bucket, total) in enumerate(zip(self.layout.buckets, sums, strict=True)):
            outgoing = self.outgoing(flats[bucket.set_index], bucket, self.wire)
            self.wait(self.group.allreduce([outgoing]), f"reduction of bucket {index}")
            self.sent_bytes += 2 * (outgoing.nbytes // self.world_size) * (self.world_size - 1)
            total.copy_(outgoing)
