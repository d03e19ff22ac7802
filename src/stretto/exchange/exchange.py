"""The exchange of one job: sums in rank order over buckets, gathers of parameters and of small records.

All contributions to a slice are sent to its owner, who adds them in rank order in float32, so that every rank and every
replay gets the same bits. Values take one hop, to all ranks, or two on N nodes of L ranks each. Rank n·L + l is rank l
of node n; a bucket is cut into N x L slices, one per rank. Rank (n, l), for its column l of the slices:

    sums, inside      p ← Σ_l' g(n, l')[:, l]                     as wide as gradients accumulate, in rank order
    sums, across      S(n, l) ← Σ_n' wire(p(n', l)[n])            in the order of nodes
    gather, across    the slices of column l from their owners    on the wire
    gather, inside    all columns from the ranks of the node      the same bytes

So 1/L of a bucket crosses per rank, in either direction, where one hop sends nearly all of it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count, repeat
from operator import call
from typing import ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from stretto.errors import ConfigError
from stretto.exchange.feedback import ErrorFeedback
from stretto.exchange.padding import Padding
from stretto.exchange.scratch import IN_FLIGHT, Scratch
from stretto.exchange.transfer import Add, Change, Level, Place, Prepare, Started, Transfer, Transfers, Wait
from stretto.exchange.wire import PackedWire, PlainWire, Wire
from stretto.flat import Layout
from stretto.groups.collectives import method_of
from stretto.records import Incident

# With more ranks than this, one call per rank costs more than another pass over memory.
_MANY = 8


def sum_in_rank_order(contributions: Tensor | Sequence[Tensor], total: Tensor) -> None:
    """Add  ((c_0 + c_1) + c_2) + ...  in the dtype of `total`.

    Terms are added one at a time: torch's `sum(0)` may pair them in another way. NumPy pairs terms only along an
    array's fastest axis, so over the first of two axes it does the same additions, without a call per rank.

    Args:
        contributions: In rank order: `(world_size, numel)`, or `(numel,)` each.
        total: `(numel,)`, overwritten.
    """
    if isinstance(contributions, Tensor):
        is_known = contributions.dtype == total.dtype in (torch.float32, torch.float64)
        is_large = len(contributions) > _MANY and total.numel() > 1  # else the first axis is the fastest
        if is_known and is_large and total.device.type == "cpu":
            # From −0.0, which changes no first term; NumPy's +0.0 would turn a sum of negative zeros.
            np.add.reduce(contributions.numpy(), axis=0, out=total.numpy(), initial=-0.0)
            return
        contributions = contributions.unbind()
    first, *others = contributions
    running = first if first.dtype == total.dtype else first.to(total.dtype)
    for contribution in others:
        running = torch.add(running, contribution, out=total)
    if not others:
        total.copy_(running)


def check_nodes(world_size: int, ranks_per_node: int) -> None:
    """Check that ranks fill their nodes; fewer ranks than a node has are one node.

    Raises:
        ConfigError: They do not.
    """
    if world_size > ranks_per_node and world_size % ranks_per_node:
        raise ConfigError(
            f"ranks_per_node={ranks_per_node}: expected a divisor of the {world_size} ranks, equally many on every node"
        )


class Exchange:
    """Performs the collectives of one job on one process group that no other code uses.

    Buffers are one tensor per flat set, padded as the layout says. Reductions are an all-to-all and a sum by the owner:
    the wire volume is a ring's, the result does not depend on the topology, sums are at least float32 on any wire, and
    the owner sees every contribution alone. On nodes only the sum over a node, and what owners publish, cross to other
    nodes: sums are associated in another way, except for nodes of one rank.

    Args:
        group: Used by no other code.
        layout: Of the buffers.
        wire: The format of contributions, between nodes where there are any, and of other values.
        wait: Waits for a collective, whose result the host needs.
        follow: Continues after a collective in the order of streams; None where works do not order them.
        numbers: How the job numbers the ranks of the group, where they are some of its ranks.
        ranks_per_node: L, where sums are taken inside nodes of consecutive ranks first; raises as `check_nodes`.
        is_native: Whether the backend adds gradients (NCCL's ring or tree), in the precision of a plain wire.
    """

    is_verified: ClassVar[bool] = False
    """Whether receivers check that values arrive undamaged."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        layout: Layout,
        wire: Wire,
        wait: Wait,
        follow: Wait | None = None,
        numbers: Sequence[int] | None = None,
        *,
        ranks_per_node: int | None = None,
        is_native: bool = False,
    ) -> None:
        self.group, self.layout, self.wire = group, layout, wire
        self.wait, self.follow = wait, follow or wait
        self.orders_streams = follow is not None
        """Whether what comes after a collective can be queued before it is complete."""
        self._all_gather = method_of(group, "all_gather_single")
        self._all_to_all = method_of(group, "all_to_all_single")
        self.rank, self.world_size = group.rank(), group.size()
        self.numbers = numbers or range(self.world_size)
        """The job's numbers of the ranks, by which messages and incidents call them."""
        self._ranks_per_node, self.is_native = ranks_per_node, is_native
        # Both hops are collectives of the job's own group, with parts of no elements for ranks that take no part: one
        # order of collectives for all ranks, and one place in which a failed rank is noticed.
        self.inside: Level | None = None
        """The ranks of this rank's node, where there are others."""
        self.across = Level(0, range(self.world_size), "")
        """The ranks to which it sends its slices: all, or one of each node."""
        self._per_node = 1
        if ranks_per_node is not None:
            check_nodes(self.world_size, ranks_per_node)
            self._per_node = each = min(ranks_per_node, self.world_size)
            node, column = divmod(self.rank, each)
            self.across = Level(2, range(column, self.world_size, each), " between nodes", crosses=True)
            if each > 1:
                self.inside = Level(1, range(node * each, (node + 1) * each), " inside a node")
        self.sent_bytes = self.crossed_bytes = 0
        """Bytes this rank has sent to others since construction, and in sums and gathers to other nodes."""
        self.feedback: ErrorFeedback | None = None
        """Errors of this rank's contributions; None if the wire keeps no residual."""
        # By bucket, the node's sums that this rank has packed last, where the wire loses something of them.
        self._packed: dict[int, Tensor] = {}
        if isinstance(wire, PackedWire) and wire.has_residual:
            packed = () if self.inside is None else (self._packed_by_rank,)
            self.feedback = ErrorFeedback(layout, wire, *packed)
        self.padding, self.round_index = Padding(layout, self.rank), 0  # the index of what travels
        self.incidents: list[Incident] = []
        """Damage that a verified exchange has found and repaired; the code that reports an incident removes it."""
        formats = [wire.of(flat.accumulation_dtype) for flat in layout.sets]
        self.contributed = [formats[bucket.set_index] for bucket in layout.buckets]
        """The format of contributions, by bucket."""
        # Of one bucket per collective, at most `IN_FLIGHT` at a time: all the memory that an exchange holds.
        self.scratch = Scratch()
        order = layout.flat_order()
        self._places = sorted(range(len(order)), key=order.__getitem__)
        buckets = [layout.buckets[place] for place in order]
        self._numels = [
            [b.numel for b in buckets if b.set_index == index] for index in range(len(layout.sets))
        ]

    def over(self, layout: Layout) -> Self:
        """Return an exchange of averages, of the same kind on the same group, over another layout."""
        return type(self)(
            self.group,
            layout,
            self.wire.for_averages,
            self.wait,
            self.follow if self.orders_streams else None,
            self.numbers,
            ranks_per_node=self._ranks_per_node,
            is_native=self.is_native,
        )

    def begin_round(self, index: int) -> None:
        """Draw new random numbers for later transfers, on wires that use any; all ranks call it with the same index."""
        self.round_index = index

    def take_account(self, other: "Exchange") -> None:
        """Count here what another exchange of this job has sent and found, and there no longer."""
        self.sent_bytes += other.sent_bytes
        self.crossed_bytes += other.crossed_bytes
        self.incidents += other.take_incidents()
        other.sent_bytes = other.crossed_bytes = 0

    def take_incidents(self) -> list[Incident]:
        """Return the damage that was found since the last call."""
        incidents, self.incidents = self.incidents, []
        return incidents

    def count_sent(self, num_bytes: int) -> None:
        """Count bytes that this rank sends outside the exchange."""
        self.sent_bytes += num_bytes

    def keep_gradients(self) -> None:
        """Keep no residual: gradients are not sent to other ranks, so packing loses nothing."""
        self.feedback = None

    @property
    def residuals(self) -> list[Tensor]:
        """What this rank has yet to send, one tensor per flat set; none where the wire keeps no errors."""
        return [] if self.feedback is None else self.feedback.residuals

    def load_residuals(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        """Take over the residuals in `states`, of all ranks that returned them; none if there are none or the wire
        keeps none.
        """
        if self.feedback is not None:
            self.feedback.load_state_dicts(states)

    def commit_residuals(self) -> None:
        """Keep the rounding errors of the last round, and the residual from before; see
        `ErrorFeedback.commit_residuals`."""
        if self.feedback is not None:
            self.feedback.commit_residuals()

    # Sums

    def reduce_scatter(self, flats: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """Sum `flats` over ranks.

        Args:
            flats: One gradient tensor per flat set, `(flat.numel,)`; they stay as they are.
            sums: One tensor per bucket, `(bucket.numel / world_size,)`, at least float32; overwritten with this rank's
                slice.
        """
        self.run(self.summing(flats, sums, whole=False))

    def all_reduce(
        self, flats: Sequence[Tensor], sums: Sequence[Tensor], wire: PlainWire | None = None
    ) -> None:
        """Sum `flats` over ranks.

        Args:
            flats: One tensor per flat set, `(flat.numel,)`; they stay as they are, unless `sums` are their buckets.
            sums: One tensor per bucket, `(bucket.numel,)`, at least float32; overwritten with the whole sum, equal on
                all ranks. It may be the bucket of `flats` itself: a bucket is written once all of it has arrived.
            wire: The format of values that are not gradients; None sends gradients in their format.
        """
        self.run(self.summing(flats, sums, whole=True, wire=wire))

    def summing(
        self, flats: Sequence[Tensor], sums: Sequence[Tensor], *, whole: bool, wire: PlainWire | None = None
    ) -> Transfers:
        """Sum `flats` over ranks, bucket by bucket, as their values come; see `reduce_scatter` and `all_reduce`."""
        buckets, most = self.cut(flats), IN_FLIGHT
        sum_up = self.sum_bucket if whole else self.sum_slice
        if self.is_native:
            sum_up = partial(self.sum_natively, whole=whole)
            # A bucket that is summed in place needs no scratch memory.
            if all(
                a.dtype == b.dtype == self._native_dtype(b, wire) for a, b in zip(buckets, sums, strict=True)
            ):
                most = len(buckets)
        yield from in_flight(map(sum_up, count(), buckets, sums, repeat(wire)), most)

    def sum_slice(self, index: int, own: Tensor, total: Tensor, wire: PlainWire | None = None) -> Transfer:
        """Send the slices of the `index`-th bucket to their owners, and add those of this rank to `total`.

        `wire` is the format of values that are not gradients; None sends gradients in their format.
        """
        sent = self.contributed[index] if wire is None else wire.of(own.dtype)
        parts = own
        if self.inside is not None:
            numel, by_column = own.numel() // self._per_node, self._slices(own).transpose(0, 1)
            if isinstance(sent, PackedWire) and sent.has_residual:
                if index not in self._packed:
                    self._packed[index] = total.new_empty(numel)
                column = self._packed[index]
            else:
                column = self.scratch("column", index, numel, total.dtype, own.device)
            yield from self.sum_parts(self.inside, index, by_column, column, PlainWire("", own.dtype))
            parts = column.view(-1, total.numel())
        yield from self.sum_parts(self.across, index, parts, total, sent)
        if sent.is_unbiased:
            self.padding.clear(index, total)

    def sum_natively(
        self, index: int, own: Tensor, total: Tensor, wire: PlainWire | None, *, whole: bool
    ) -> Transfer:
        """Let the backend add up a bucket, or this rank's slice of it, as `total`."""
        # As wide as wire and sum, where the buffer is narrower: the backend's partial sums gain from the extra bits.
        dtype, others = self._native_dtype(total, wire), self.world_size - 1
        arrived = total
        if total.dtype != dtype:
            arrived = self.scratch("own", index, total.numel(), dtype, total.device)
        if whole:
            arrived.copy_(own)  # the backend sums in place, and `own` stays
            self.sent_bytes += 2 * (arrived.nbytes // self.world_size) * others
            work = self.group.allreduce([arrived])
        else:
            outgoing = own
            if own.dtype != dtype:
                outgoing = self.scratch("outgoing", index, own.numel(), dtype, own.device).copy_(own)
            self.sent_bytes += outgoing.nbytes // self.world_size * others
            scatter = method_of(self.group, "reduce_scatter_single")
            work = scatter(arrived, outgoing, dist.ReduceScatterOptions())
        yield work, f"reduction of bucket {index}"
        if arrived is not total:
            total.copy_(arrived)

    def _native_dtype(self, total: Tensor, wire: PlainWire | None) -> torch.dtype:
        return (wire or self.wire.values).of(total.dtype).dtype

    def _slices(self, bucket: Tensor) -> Tensor:
        """Return the slices of a bucket by node and rank of the node, `(N, L, numel / world_size)`."""
        return bucket.view(-1, self._per_node, bucket.numel() // self.world_size)

    def _packed_by_rank(self, index: int, bucket: Tensor) -> tuple[Tensor, Tensor]:
        """Return what this rank has packed, a node's sums of its column; and where in the bucket these are."""
        return self._packed[index], self._slices(bucket)[:, self.rank % self._per_node]

    def sum_parts(self, level: Level, index: int, parts: Tensor, total: Tensor, sent: Wire) -> Transfer:
        """Send the ranks of a level their parts, and add up in `total` what comes from them.

        Args:
            level: The ranks.
            index: Of the transfer: those in flight have scratch their own memory.
            parts: One for each rank of the level, `(ranks, ...)`, or side by side; they stay as they are.
            total: `(numel of a part,)`, overwritten.
            sent: The format in which parts are sent.
        """
        numel, ranks, is_plain = parts.numel(), len(level.ranks), isinstance(sent, PlainWire)
        if not isinstance(sent, PlainWire):
            outgoing = self.scratch("outgoing", index, sent.num_bytes(numel), torch.uint8, parts.device)
            sent.drawn("sums", self.round_index, *[self.rank] * ranks).write(parts.view(-1), outgoing)
        elif parts.dtype == sent.dtype and parts.is_contiguous():
            outgoing = parts if parts.dim() == 1 else parts.view(-1)
        else:
            outgoing = self.scratch("outgoing", index, numel, sent.dtype, parts.device)
            outgoing.view(parts.shape).copy_(parts)
        received = outgoing  # a lone rank's contributions lie where they arrive
        if self.world_size > 1:
            received = self.scratch("received", index, outgoing.numel(), outgoing.dtype, outgoing.device)
        yield self.send(level, received, outgoing), f"reduction of bucket {index}{level.where}"
        if not is_plain:
            received = sent.drawn("sums", self.round_index, *level.ranks).read(received)
        self.add_up(received.chunk(ranks) if is_plain and ranks <= _MANY else received.view(ranks, -1), total)

    def sum_bucket(self, index: int, own: Tensor, total: Tensor, wire: PlainWire | None = None) -> Transfer:
        """Sum the `index`-th bucket: the sums of all owners, rounded to the wire, as `total` on all ranks."""
        # The owner's slice lies where the gather writes it.
        yield from self.sum_slice(index, own, total.view(self.world_size, -1)[self.rank], wire)
        yield from self.gather_sum(index, own, total, wire)

    def gather_sum(self, index: int, own: Tensor, total: Tensor, wire: PlainWire | None = None) -> Transfer:
        """Replace `total` by the sums of all owners, rounded to the wire, no wider than this rank's values."""
        sent = (wire or self.wire.values).of(own.dtype)
        yield from self.gather(total, index, sent.dtype, f"gather of summed bucket {index}")

    def cut(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return views of `flats`, one tensor per flat set, by bucket: a call for each costs the host far more."""
        cut: list[Tensor] = []
        for flat, numels in zip(flats, self._numels, strict=True):
            cut += flat.split_with_sizes(numels)
        return list(map(cut.__getitem__, self._places))

    add_up = staticmethod(sum_in_rank_order)
    """Writes the sum of contributions, one per rank, into a total, in its dtype."""

    # Gathers

    def all_gather(self, flats: Sequence[Tensor], formats: Sequence[PlainWire]) -> None:
        """Replace every bucket of `flats` by the owners' slices, rounded to the wire.

        Args:
            flats: One tensor per flat set, `(flat.numel,)`, holding this rank's own slices; overwritten whole.
            formats: By flat set, no wider than its parameters are stored.
        """
        gathers = []
        for index, (bucket, whole) in enumerate(zip(self.layout.buckets, self.cut(flats), strict=True)):
            dtype = formats[bucket.set_index].dtype
            gathers.append(partial(self.gather, whole, index, dtype, f"gather of bucket {index}"))
        self.perform(gathers)

    def gather_changes(self, wire: PackedWire, change: Change, add: Add) -> None:
        """Gather the packed changes that all owners have for their slices, and add them."""
        wholes: dict[int, Tensor] = {}

        def transfer(index: int) -> Transfer:
            bucket = self.layout.buckets[index]
            device, numel = self.layout.sets[bucket.set_index].device, wire.num_bytes(bucket.numel)
            whole = wholes.get(index)
            if whole is None:  # not a repeat: a change may add what packing lost before in place, once
                if self.is_verified:  # added when no rank misses a row, which may be sent again
                    whole = wholes[index] = torch.empty(numel, dtype=torch.uint8, device=device)
                else:
                    whole = self.scratch("packed", index, numel, torch.uint8, device)
                own = whole.view(self.world_size, -1)[self.rank]
                wire.drawn("changes", self.round_index, self.rank).write(change(index), own)
            yield from self.gather(whole, index, whole.dtype, f"gather of bucket {index}")
            if not self.is_verified:
                add_up(index, whole)

        def add_up(index: int, whole: Tensor) -> None:
            changes = wire.drawn("changes", self.round_index, *range(self.world_size)).read(whole)
            add(index, self.padding.clear(index, changes) if wire.is_unbiased else changes)

        indices = range(len(self.layout.buckets))
        self.perform([partial(transfer, index) for index in indices])
        for index in indices if self.is_verified else ():
            add_up(index, wholes[index])

    def gather(self, whole: Tensor, index: int, dtype: torch.dtype, what: str) -> Transfer:
        """Replace `whole`, `(numel,)`, by every rank's slice of it, rounded to `dtype`: across nodes, then inside.

        Args:
            whole: Has this rank's slice at its position; overwritten.
            index: Of the transfer: transfers in flight have separate scratch memory.
            dtype: In which values are sent.
            what: Name of the wait, for messages.
        """
        # Every rank installs the values that come back over the wire, the owner and a lone rank too: with its own wider
        # values an owner would differ from all other ranks in every element.
        own = whole if self.world_size == 1 else whole.view(self.world_size, -1)[self.rank]
        numel, device = whole.numel(), whole.device
        if self.inside is None:
            arrived = whole
            if whole.dtype != dtype:
                arrived = self.scratch("whole", index, numel, dtype, device)
            yield from self.gather_parts(self.across, index, own, arrived, what)
            if arrived is not whole:
                whole.copy_(arrived)
            return
        column = self.scratch("gathered column", index, numel // self._per_node, dtype, device)
        yield from self.gather_parts(self.across, index, own, column, what)
        columns = self.scratch("columns", index, numel, dtype, device)
        yield from self.gather_parts(self.inside, index, column, columns, what)
        self._slices(whole).copy_(columns.view(self._per_node, -1, own.numel()).transpose(0, 1))

    def gather_parts(self, level: Level, index: int, own: Tensor, whole: Tensor, what: str) -> Transfer:
        """Replace `whole` by what each rank of a level has as `own`, in the dtype of `whole`.

        Args:
            level: The ranks.
            index: Of the transfer.
            own: `(numel,)`; may be this rank's part of `whole`.
            whole: `(ranks * numel,)`, overwritten.
            what: Name of the wait, for messages.
        """
        is_everyone = len(level.ranks) == self.world_size
        outgoing, copies = own, 1 if is_everyone else len(level.ranks)
        if self.world_size > 1 or own.dtype != whole.dtype:
            outgoing = self.scratch("own", index, copies * own.numel(), whole.dtype, whole.device)
            (outgoing if copies == 1 else outgoing.view(copies, -1)).copy_(own)
        if is_everyone:
            sent_bytes = (self.world_size - 1) * outgoing.nbytes
            self.sent_bytes += sent_bytes
            self.crossed_bytes += sent_bytes * level.crosses
            yield self._all_gather(whole, outgoing), what
        else:
            yield self.send(level, whole, outgoing), what

    def gather_values(self, own: Tensor, whole: Tensor, what: str) -> None:
        """Gather every rank's `own`, `(numel,)`, into `whole`, `(world_size * numel,)` of the same dtype."""
        whole.view(self.world_size, -1)[self.rank].copy_(own)
        self.perform([partial(self.gather, whole, 0, whole.dtype, what)])

    def perform(self, transfers: Sequence[Callable[[], Transfer]]) -> None:
        """Run gathers, one of every bucket in order, at most `IN_FLIGHT` at a time."""
        self.run(in_flight(map(call, transfers)))

    def send(self, level: Level, received: Tensor, outgoing: Tensor) -> dist.Work:
        """Start to send equal parts to the ranks of a level, and to receive one from each."""
        part = outgoing.numel() // len(level.ranks)
        sent_bytes = (len(level.ranks) - 1) * part * outgoing.itemsize
        self.sent_bytes += sent_bytes
        self.crossed_bytes += sent_bytes * level.crosses
        is_everyone = len(level.ranks) == self.world_size
        splits = [] if is_everyone else [part * (rank in level.ranks) for rank in range(self.world_size)]
        return self._all_to_all(received, outgoing, splits, splits)

    def run(self, transfers: Transfers, prepare: Prepare | None = None) -> None:
        """Run transfers of values that are there, each bucket prepared right before it leaves."""
        for awaited in transfers:
            if isinstance(awaited, tuple):
                self.follow(*awaited)
            elif isinstance(awaited, int) and prepare is not None:
                prepare(awaited)

    # Small records

    def gather_bytes(self, record: bytes, places: Sequence[Place] = ()) -> list[bytes]:
        """Return every rank's `record`, in rank order; all records must have one length.

        They are sent as int8, a dtype that no values use, so that an observer can distinguish records from values.

        Args:
            record: Of this rank.
            places: Parts of it that only a device knows. They are written there, so that the host waits once: for all
                records together.
        """
        device = self.layout.sets[0].device
        own = torch.frombuffer(bytearray(record), dtype=torch.int8)
        own = (own.pin_memory() if device.type == "cuda" else own).to(device, non_blocking=True)
        for begin, part in places:
            own[begin : begin + part.numel()].copy_(part)
        whole = torch.empty(self.world_size * own.numel(), dtype=torch.int8, device=device)
        self.wait(self._all_gather(whole, own), "round report")
        self.sent_bytes += (self.world_size - 1) * own.nbytes
        records: list[bytes] = whole.cpu().numpy().view(f"V{len(record)}").tolist()
        return records

    def gather_records(self, record: bytes) -> list[bytes]:
        """Return every rank's `record`, of any length, in rank order; only lengths are sent if all are empty."""
        own = len(record).to_bytes(8)
        lengths = [int.from_bytes(length) for length in self.gather_bytes(own)]
        if not any(lengths):
            return [b""] * len(lengths)
        parts = self.gather_bytes(record.ljust(max(lengths), b"\0"))
        return [part[:length] for part, length in zip(parts, lengths, strict=True)]


def in_flight(transfers: Iterable[Transfer], most: int = IN_FLIGHT) -> Transfers:
    """Run transfers, at most `most` at a time: they start and finish in the order given, which is every rank's.

    One large transfer fills the queue of a slow link and then waits for itself; a few smaller ones keep the link busy
    while others are summed.
    """
    waiting = enumerate(transfers)
    under_way: deque[tuple[Transfer, Started]] = deque()
    while True:
        while len(under_way) < most and (following := next(waiting, None)) is not None:
            index, transfer = following
            yield index
            under_way.append((transfer, next(transfer)))
        if not under_way:
            return
        transfer, started = under_way.popleft()
        yield started
        # A transfer that starts another collective goes to the end of the queue.
        again = next(transfer, None)
        if again is not None:
            under_way.append((transfer, again))
