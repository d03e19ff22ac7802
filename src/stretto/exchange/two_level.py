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
    one order of collectives for all ranks, and one place in which a failed rank is noticed. their own Groups would
    save a copy of each gather, and need both.
"""

from typing import Self

import torch
from torch import Tensor
from torch import distributed as dist

from stretto.errors import ConfigError
from stretto.exchange.exchange import Exchange
from stretto.exchange.feedback import ErrorFeedback
from stretto.exchange.transfer import Level, Transfer, Wait
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

    Results are the same on all ranks and in every run. With one rank per node they equal the results of `Exchange` to
    the bit; otherwise sums are associated in another way.

    Args:
        group: Used by no other code; consecutive ranks are on one node.
        layout: Of the buffers.
        wire: The format in which contributions cross between nodes, and in which everything else is sent.
        wait: Waits for a collective.
        ranks_per_node: L; raises as `check_nodes`.
        follow: Continues after a collective, or None, as in `Exchange`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        layout: Layout,
        wire: Wire,
        wait: Wait,
        ranks_per_node: int,
        follow: Wait | None = None,
    ) -> None:
        super().__init__(group, layout, wire, wait, follow)
        check_nodes(self.world_size, ranks_per_node)
        self._per_node = each = min(ranks_per_node, self.world_size)
        self._node, self._column = divmod(self.rank, each)
        self.on_node = range(self._node * each, (self._node + 1) * each)
        """The ranks of this rank's node."""
        self._inside = Level(1, self.on_node, " inside a node")
        self._between = Level(2, range(self._column, self.world_size, each), " between nodes", crosses=True)
        self._packed: dict[int, Tensor] = {}
        """What this rank has packed of each bucket last, where the wire loses something of it."""
        if isinstance(wire, PackedWire) and wire.has_residual:
            self.feedback = ErrorFeedback(layout, wire, self._packed_by_rank)

    def over(self, layout: Layout) -> Self:
        """Return an exchange of averages, of the same kind on the same group, over another layout."""
        wait, follow = self.waits
        return type(self)(self.group, layout, self.wire.for_averages, wait, self._per_node, follow)

    def _packed_by_rank(self, index: int, bucket: Tensor) -> tuple[Tensor, Tensor]:
        """Return what this rank has packed, a node's sums of its column; and where in the bucket these are."""
        return self._packed[index], self._slices(bucket)[:, self._column]

    def sum_slice(self, index: int, own: Tensor, total: Tensor, wire: PlainWire | None = None) -> Transfer:
        """Sum the `index`-th bucket over each node, and over nodes this rank's slice of it into `total`."""
        sent = self.contributed[index] if wire is None else wire.of(own.dtype)
        by_column = self._slices(own).transpose(0, 1)
        numel = own.numel() // self._per_node
        if isinstance(sent, PackedWire) and sent.has_residual:
            if index not in self._packed:
                self._packed[index] = total.new_empty(numel)
            column = self._packed[index]
        else:
            column = self.scratch("column", index, numel, total.dtype, own.device)
        yield from self.sum_parts(self._inside, index, by_column, column, PlainWire("", own.dtype))
        yield from self.sum_parts(self._between, index, column.view(-1, total.numel()), total, sent)
        if sent.is_unbiased:
            self.padding.clear(index, total)

    def gather(self, whole: Tensor, index: int, dtype: torch.dtype, what: str) -> Transfer:
        """Replace `whole`, `(numel,)`, by every rank's slice of it, rounded to `dtype`: across nodes, then inside."""
        own = whole.view(self.world_size, -1)[self.rank]
        numel, device = whole.numel(), whole.device
        column = self.scratch("gathered column", index, numel // self._per_node, dtype, device)
        yield from self.gather_parts(self._between, index, own, column, what)
        columns = self.scratch("columns", index, numel, dtype, device)
        yield from self.gather_parts(self._inside, index, column, columns, what)
        self._slices(whole).copy_(columns.view(self._per_node, -1, own.numel()).transpose(0, 1))

    def _slices(self, bucket: Tensor) -> Tensor:
        """Return the slices of a bucket by node and rank of the node, `(N, L, numel / world_size)`."""
        return bucket.view(-1, self._per_node, bucket.numel() // self.world_size)
