"""The exchange of ranks on nodes: sums inside each node first, so that every value crosses to another node once.

There are N nodes of L ranks each; rank n·L + l is rank l of node n. A bucket is cut into N x L slices, one per rank.
Rank (n, l), for its column l of the slices:

    sums, inside      p ← Σ_l' g(n, l')[:, l]                     as wide as gradients accumulate, in rank order
    sums, across      S(n, l) ← Σ_n' wire(p(n', l)[n])            in the order of nodes
    gather, across    the slices of column l from their owners    on the wire
    gather, inside    all columns from the ranks of the node      the same bytes

So 1/L of a bucket crosses per rank, in either direction, where one level sends nearly all of it.

Note [One group]
    Both levels are all-to-alls on the job's own group, with parts of no elements for ranks that take no part. There is
    one order of collectives for all ranks, and one place in which a failed rank is noticed. Groups of their own would
    save a copy of each gather, and need both.
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from torch import distributed as dist

from stretto.errors import ConfigError
from stretto.exchange.exchange import Exchange, Transfer, Wait
from stretto.exchange.feedback import ErrorFeedback
from stretto.exchange.wire import PackedWire, PlainWire, Wire
from stretto.flat import Layout


def check_nodes(world_size: int, ranks_per_node: int) -> None:
    """Check that ranks fill their nodes; fewer ranks than a node has are one node.

    Raises:
        ConfigError: They do not.
    """
    if world_size > ranks_per_node and world_size % ranks_per_node:
        raise ConfigError(
            f"ranks_per_node={ranks_per_node}: expected a divisor of the {world_size} ranks, equally many on every node"
        )


class TwoLevelExchange(Exchange):
    """An exchange in which only sums over a node, and what owners publish, cross between nodes.

    Results are the same on all ranks and in every run. With one rank per node they are those of `Exchange` to the bit;
    otherwise sums are associated in another way.

    Args:
        group: Used by nobody else; consecutive ranks lie on one node.
        layout: Of the buffers.
        wire: The format in which contributions cross between nodes, and in which everything else travels.
        wait: Waits for a collective.
        ranks_per_node: L; errors are those of `check_nodes`.
    """

    def __init__(
        self, group: dist.ProcessGroup, layout: Layout, wire: Wire, wait: Wait, ranks_per_node: int
    ) -> None:
        super().__init__(group, layout, wire, wait)
        check_nodes(self.world_size, ranks_per_node)
        self._per_node = each = min(ranks_per_node, self.world_size)
        self._node, self._column = divmod(self.rank, each)
        self.on_node = range(self._node * each, (self._node + 1) * each)
        """The ranks of this rank's node."""
        self._in_column = range(self._column, self.world_size, each)
        self.crossed_bytes = 0
        """Bytes of sums and gathers that this rank has sent to other nodes since construction."""
        if isinstance(wire, PackedWire):
            self.feedback = ErrorFeedback(layout, wire, self._packed_part)

    def over(self, layout: Layout) -> Self:
        """Return an exchange of the same kind on the same group, over another layout."""
        return type(self)(self.group, layout, self.wire, self.wait, self._per_node)

    def take_account(self, other: Exchange) -> None:
        """Count here what another exchange of this job has sent and found, and there no longer."""
        super().take_account(other)
        if isinstance(other, TwoLevelExchange):
            self.crossed_bytes += other.crossed_bytes
            other.crossed_bytes = 0

    def _packed_part(self, bucket: Tensor) -> Tensor:
        """Return a view of what this rank packs: a node's sums of its column, `(N, bucket.numel / world_size)`."""
        return self._slices(bucket)[:, self._column]

    def sum_slice(self, index: int, flat: Tensor, total: Tensor, wire: PlainWire | None = None) -> Transfer:
        """Sum the `index`-th bucket of `flat` over each node, and over nodes this rank's slice of it into `total`."""
        bucket = self.layout.buckets[index]
        sent = self._contributed[bucket.set_index] if wire is None else wire.of(flat.dtype)
        whole = flat.narrow(0, bucket.start, bucket.numel)
        by_column = self._scratch_like("outgoing", index, whole)
        by_column.view(self._per_node, -1, total.numel()).copy_(self._slices(whole).transpose(0, 1))
        received = self._scratch_like("received", index, whole)
        yield self._send(received, by_column, self.on_node), f"reduction of bucket {index} inside a node"
        column = self.scratch("column", index, received.numel() // self._per_node, total.dtype, flat.device)
        self.add_up(received.view(self._per_node, -1), column)
        if isinstance(sent, PackedWire) and self.feedback is not None:
            self._packed_part(whole).copy_(column.view(-1, total.numel()))  # see `ErrorFeedback.settle`
        packed = self.scratch("packed", index, sent.num_bytes(column.numel()), torch.uint8, flat.device)
        sent.write(column, packed)
        arrived = self._scratch_like("arrived", index, packed)
        yield self._send(arrived, packed, self._in_column), f"reduction of bucket {index} between nodes"
        self.add_up(sent.read(arrived).view(-1, total.numel()), total)

    def gather(self, whole: Tensor, index: int, dtype: torch.dtype, what: str) -> Transfer:
        """Replace `whole`, `(numel,)`, by every rank's slice of it, rounded to `dtype`: across nodes, then inside."""
        numel = whole.numel()
        own = whole.view(self.world_size, -1)[self.rank]
        column = numel // self._per_node
        for_column = self.scratch("own", index, column, dtype, whole.device)
        for_column.view(-1, own.numel()).copy_(own)  # once for each node
        arrived = self._scratch_like("column", index, for_column)
        yield self._send(arrived, for_column, self._in_column), what
        for_node = self.scratch("whole", index, numel, dtype, whole.device)
        for_node.view(-1, column).copy_(arrived)  # once for each rank of the node
        columns = self._scratch_like("columns", index, for_node)
        yield self._send(columns, for_node, self.on_node), what
        self._slices(whole).copy_(columns.view(self._per_node, -1, own.numel()).transpose(0, 1))

    def _send(self, received: Tensor, outgoing: Tensor, ranks: Sequence[int]) -> dist.Work:
        """Start to send equal parts to some ranks, this one among them, and to receive one from each."""
        part = outgoing.numel() // len(ranks)
        splits = [part if rank in ranks else 0 for rank in range(self.world_size)]
        sent_bytes = (len(ranks) - 1) * part * outgoing.itemsize
        self.sent_bytes += sent_bytes
        if ranks is self._in_column:
            self.crossed_bytes += sent_bytes
        return self.group.all_to_all_single(received, outgoing, splits, splits)

    def _slices(self, bucket: Tensor) -> Tensor:
        """Return the slices of a bucket by node and rank of the node, `(N, L, numel / world_size)`."""
        return bucket.view(-1, self._per_node, bucket.numel() // self.world_size)

    def _scratch_like(self, role: str, index: int, other: Tensor) -> Tensor:
        return self.scratch(role, index, other.numel(), other.dtype, other.device)
