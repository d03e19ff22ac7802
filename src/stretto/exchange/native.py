"""The native exchange: the backend adds the gradients, by its own reduce-scatter and all-reduce."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from stretto.exchange.exchange import Exchange, in_flight
from stretto.exchange.scratch import IN_FLIGHT
from stretto.exchange.transfer import Transfer, Transfers
from stretto.exchange.wire import PlainWire
from stretto.groups.collectives import method_of


class NativeExchange(Exchange):
    """Leaves the sum to the backend (NCCL's ring or tree), in the wire's precision.

    Where the buffer is narrower than wire and sum, it is sent as wide as they are: the backend's partial sums gain
    from the extra bits. Packed wires have no sum that a backend could know.
    """

    def summing(
        self, flats: Sequence[Tensor], sums: Sequence[Tensor], *, whole: bool, wire: PlainWire | None = None
    ) -> Transfers:
        """Sum `flats` over ranks; all buckets at a time, because each is summed in place and needs no scratch."""
        sum_up = self.sum_bucket if whole else self.sum_slice
        transfers, needs_scratch = [], False
        for index, (values, total) in enumerate(zip(self.cut(flats), sums, strict=True)):
            needs_scratch |= not values.dtype == total.dtype == self._dtype(total, wire)
            transfers.append(sum_up(index, values, total, wire))
        yield from in_flight(transfers, IN_FLIGHT if needs_scratch else len(transfers))

    def sum_slice(self, index: int, own: Tensor, total: Tensor, wire: PlainWire | None = None) -> Transfer:
        """Sum this rank's slice of a bucket with the backend's reduce-scatter."""
        outgoing = self._outgoing(index, own, total, wire)
        same = total.dtype == outgoing.dtype
        out = total if same else self.scratch("own", index, total.numel(), outgoing.dtype, total.device)
        self.sent_bytes += outgoing.nbytes // self.world_size * (self.world_size - 1)
        work = method_of(self.group, "reduce_scatter_single")(out, outgoing, dist.ReduceScatterOptions())
        yield work, f"reduction of bucket {index}"
        if not same:
            total.copy_(out)

    def sum_bucket(self, index: int, own: Tensor, total: Tensor, wire: PlainWire | None = None) -> Transfer:
        """Sum a whole bucket with the backend's all-reduce."""
        dtype, summed = self._dtype(total, wire), total
        if total.dtype != dtype:
            summed = self.scratch("outgoing", index, own.numel(), dtype, own.device)
        summed.copy_(own)  # the backend sums in place, and `own` stays
        self.sent_bytes += 2 * (summed.nbytes // self.world_size) * (self.world_size - 1)
        yield self.group.allreduce([summed]), f"reduction of bucket {index}"
        if summed is not total:
            total.copy_(summed)

    def _outgoing(self, index: int, values: Tensor, total: Tensor, wire: PlainWire | None) -> Tensor:
        """Return a bucket in the dtype in which it is summed: the buffer itself where it already has it."""
        dtype = self._dtype(total, wire)
        if values.dtype == dtype:
            return values
        return self.scratch("outgoing", index, values.numel(), dtype, values.device).copy_(values)

    def _dtype(self, total: Tensor, wire: PlainWire | None) -> torch.dtype:
        dtype: torch.dtype = (wire or self.wire.values).of(total.dtype).dtype
        return dtype
