"""The native exchange: the backend's own reduce-scatter and all-reduce."""

from torch import Tensor
from torch import distributed as dist

from stretto.exchange.exchange import Exchange, Transfer
from stretto.flat import Bucket


class NativeExchange(Exchange):
    """Leaves the sum to the backend (NCCL's ring or tree), in the wire's precision.

    The wire dtype is taken as asked for, also where the buffer is narrower: there the backend's partial sums
    gain from the extra bits.
    """

    def sum_slice(self, index: int, bucket: Bucket, flat: Tensor, total: Tensor) -> Transfer:
        """See `Exchange.sum_slice`."""
        outgoing = self.outgoing(flat, bucket, index, self.wire)
        same = total.dtype == self.wire
        out = total if same else self.scratch("own", index, total.numel(), self.wire, total.device)
        self.sent_bytes += outgoing.nbytes // self.world_size * (self.world_size - 1)
        work = self.group.reduce_scatter_single(out, outgoing, dist.ReduceScatterOptions())
        yield work, f"reduction of bucket {index}"
        if not same:
            total.copy_(out)

    def sum_bucket(self, index: int, bucket: Bucket, flat: Tensor, total: Tensor) -> Transfer:
        """See `Exchange.sum_bucket`."""
        outgoing = self.outgoing(flat, bucket, index, self.wire)
        self.sent_bytes += 2 * (outgoing.nbytes // self.world_size) * (self.world_size - 1)
        yield self.group.allreduce([outgoing]), f"reduction of bucket {index}"
        total.copy_(outgoing)
