"""The contract of an exchange, and what all exchanges share: wire formats, gathers of parameters and small records."""

import functools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch import distributed as dist

from stretto.flat import Bucket, Layout
from stretto.records import Incident

WireFormat = Literal["fp32", "bf16", "int8"]


def wire_dtype(wire: WireFormat) -> torch.dtype:
    """Return the dtype in which a wire format sends parameters; int8 is for gradients."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.bfloat16}[wire]


def narrower(wire: torch.dtype, storage: torch.dtype) -> torch.dtype:
    """Return the dtype in which `storage` values travel: the narrower one, as a wider wire adds bytes and no bits."""
    return wire if wire.itemsize < storage.itemsize else storage


Wait = Callable[[dist.Work, str], None]
"""Waits for a collective, which the text names in messages. Raises the job's error if it cannot complete."""


Transfer = Generator[tuple[dist.Work, str], None, None]
"""The transfer of one bucket: yields each collective it starts, with its name, and goes on when that is complete."""

_LENGTH_BYTES = 8
"""Bytes of the length of a record, where lengths differ between ranks."""
IN_FLIGHT = 4
"""Buckets that travel at a time: enough to keep a link busy while one is summed."""


class Exchange(ABC):
    """Performs the collectives of one job on one process group that nobody else uses.

    Buffers are one tensor per flat set, padded as the layout says. Reductions end in float32 sums, whatever
    the wire; the division by the total weight is the owner's. One bucket travels per collective, and at most
    `IN_FLIGHT` buckets travel at a time, so that their scratch memory is all an exchange holds.

    Note [In flight]
        One large transfer fills the queue of a slow link and then waits for itself; a few smaller ones at a time
        keep the link busy while others are summed or copied. Collectives are started and finished in one order
        that depends on the layout only, so it is every rank's order.

    Note [Wire rounding]
        Every rank installs the values that come back over the wire, including the owner and a lone rank. An owner
        that kept its own wider values would differ from all other ranks in every element.
    """

    is_verified: ClassVar[bool] = False
    """Whether what arrives is checked against what was sent."""

    def __init__(self, group: dist.ProcessGroup, layout: Layout, wire: torch.dtype, wait: Wait) -> None:
        self.group = group
        self.layout = layout
        self.wire = wire
        self.wait = wait
        self.rank = group.rank()
        self.world_size = group.size()
        self.sent_bytes = 0
        """Bytes this rank has sent to others since construction."""
        self.owed: list[Tensor] = []
        """Rounding errors of this rank's contributions, which are sent with the next ones; one tensor per flat set.
        A bit-identical continuation needs them."""
        self.incidents: list[Incident] = []
        """Damage that a verified exchange has found and repaired; the code that reports an incident removes it."""
        self._scratch: dict[tuple[str, int, torch.dtype, torch.device], Tensor] = {}

    def owe(self, errors: Sequence[Tensor]) -> None:
        """Restore `owed` from the `errors` of a checkpoint; set it to zero if there are none."""
        for index, owed in enumerate(self.owed):
            owed.copy_(errors[index]) if errors else owed.zero_()

    @abstractmethod
    def sum_slice(
        self, index: int, bucket: Bucket, flat: Tensor, total: Tensor, wire: torch.dtype | None = None
    ) -> Transfer:
        """Sum the `index`-th bucket of `flat` over ranks; `total` takes this rank's slice.

        `wire` is the dtype in which values travel that are not gradients; None sends gradients in their format.
        """

    @abstractmethod
    def sum_bucket(
        self, index: int, bucket: Bucket, flat: Tensor, total: Tensor, wire: torch.dtype | None = None
    ) -> Transfer:
        """Sum the `index`-th bucket of `flat` over ranks; `total` takes all of it, equal on all ranks."""

    def reduce_scatter(self, flats: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """Sum `flats` over ranks.

        Args:
            flats: One gradient tensor per flat set, `(flat.numel,)`; left undefined.
            sums: One float32 tensor per bucket, `(bucket.numel / world_size,)`, overwritten with this rank's slice.
        """
        self.perform(self._by_bucket(self.sum_slice, flats, sums))

    def all_reduce(
        self, flats: Sequence[Tensor], sums: Sequence[Tensor], wire: torch.dtype | None = None
    ) -> None:
        """Sum `flats` over ranks.

        Args:
            flats: One tensor per flat set, `(flat.numel,)`; left undefined.
            sums: One float32 tensor per bucket, `(bucket.numel,)`, overwritten with the whole sum, equal on all ranks.
            wire: In which values travel that are not gradients; None sends gradients in their format.
        """
        self.perform(self._by_bucket(functools.partial(self.sum_bucket, wire=wire), flats, sums))

    def all_gather(self, flats: Sequence[Tensor]) -> None:
        """Replace every bucket of `flats` by the owners' slices, rounded to the wire.

        Args:
            flats: One tensor per flat set, `(flat.numel,)`, holding this rank's own slices; overwritten whole.
        """
        self.perform(
            self._gather_slices(index, bucket, flats) for index, bucket in enumerate(self.layout.buckets)
        )

    def perform(self, transfers: Iterable[Transfer]) -> None:
        """Run transfers, at most `IN_FLIGHT` at a time, as Note [In flight] explains."""
        under_way: deque[tuple[Transfer, tuple[dist.Work, str]]] = deque()
        for transfer in transfers:
            under_way.append((transfer, next(transfer)))
            while len(under_way) == IN_FLIGHT:
                self._advance(under_way)
        while under_way:
            self._advance(under_way)

    def gather(self, own: Tensor, out: Tensor, index: int, what: str) -> Transfer:
        """Gather `own`, `(numel / world_size,)` in its wire dtype, into `out`, `(numel,)` in any dtype.

        Args:
            own: This rank's slice; not to be written before the transfer ends.
            out: Overwritten.
            index: Of the transfer: those in flight have scratch memory of their own.
            what: What is waited for, in messages.
        """
        same = out.dtype == own.dtype
        whole = out if same else self.scratch("whole", index, out.numel(), own.dtype, out.device)
        self.sent_bytes += (self.world_size - 1) * own.nbytes
        yield self.group.all_gather_single(whole, own), what
        if not same:
            out.copy_(whole)

    def gather_values(self, own: Tensor, whole: Tensor, what: str) -> None:
        """Gather every rank's `own`, `(numel,)`, into `whole`, `(world_size * numel,)` of the same dtype."""
        self.perform([self.gather(own, whole, 0, what)])

    def gather_bytes(self, record: bytes) -> list[bytes]:
        """Return every rank's `record`, in rank order; all records must have one length.

        They travel as int8, a dtype that no values use, so that an observer can tell records from values.
        """
        device = self.layout.sets[0].device
        own = torch.frombuffer(bytearray(record), dtype=torch.int8).to(device)
        whole = torch.empty(self.world_size * own.numel(), dtype=torch.int8, device=device)
        self.wait(self.group.all_gather_single(whole, own), "round report")
        self.sent_bytes += (self.world_size - 1) * own.nbytes
        records: list[bytes] = whole.cpu().numpy().view(f"V{len(record)}").tolist()
        return records

    def gather_records(self, record: bytes) -> list[bytes]:
        """Return every rank's `record`, of any length, in rank order; only lengths travel if all are empty."""
        own = len(record).to_bytes(_LENGTH_BYTES)
        lengths = [int.from_bytes(length) for length in self.gather_bytes(own)]
        if not any(lengths):
            return [b""] * len(lengths)
        parts = self.gather_bytes(record.ljust(max(lengths), b"\0"))
        return [part[:length] for part, length in zip(parts, lengths, strict=True)]

    def broadcast(self, tensor: Tensor, source: int, what: str) -> None:
        """Overwrite `tensor`, of any dtype, shape and strides, with what rank `source` holds.

        Args:
            tensor: On any device; as large on all ranks.
            source: The rank that sends.
            what: What is waited for, in messages.
        """
        if tensor.numel() == 0:
            return
        options = dist.BroadcastOptions()
        options.rootRank = source
        # As bytes: backends do not know every dtype.
        content = tensor.detach().contiguous().view(-1).view(torch.uint8).to(self.layout.sets[0].device)
        if self.rank == source:
            self.sent_bytes += (self.world_size - 1) * content.numel()
        self.wait(self.group.broadcast([content], options), what)
        if content.data_ptr() != tensor.data_ptr():
            with torch.no_grad():
                tensor.copy_(content.to(tensor.device).view(tensor.dtype).view(tensor.shape))

    def scratch(self, role: str, index: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return `numel` reusable elements for a role in the `index`-th transfer, valid until that one ends."""
        key = (role, index % IN_FLIGHT, dtype, device)
        held = self._scratch.get(key)
        if held is None or held.numel() < numel:
            held = self._scratch[key] = torch.empty(numel, dtype=dtype, device=device)
        return held[:numel]

    def outgoing(self, flat: Tensor, bucket: Bucket, index: int, dtype: torch.dtype) -> Tensor:
        """Return the `index`-th bucket of `flat` in `dtype`: the buffer itself where it already has it."""
        content = flat[bucket.start : bucket.stop]
        if content.dtype == dtype:
            return content
        return self.scratch("outgoing", index, bucket.numel, dtype, flat.device).copy_(content)

    def _by_bucket(
        self,
        summed: Callable[[int, Bucket, Tensor, Tensor], Transfer],
        flats: Sequence[Tensor],
        sums: Sequence[Tensor],
    ) -> Iterator[Transfer]:
        for index, (bucket, total) in enumerate(zip(self.layout.buckets, sums, strict=True)):
            yield summed(index, bucket, flats[bucket.set_index], total)

    def _gather_slices(self, index: int, bucket: Bucket, flats: Sequence[Tensor]) -> Transfer:
        start, stop = bucket.owned_range(self.rank, self.world_size)
        flat = flats[bucket.set_index]
        dtype = narrower(self.wire, self.layout.sets[bucket.set_index].dtype)
        own = self.scratch("own", index, stop - start, dtype, flat.device).copy_(flat[start:stop])
        yield from self.gather(own, flat[bucket.start : bucket.stop], index, f"gather of bucket {index}")

    def _advance(self, under_way: "deque[tuple[Transfer, tuple[dist.Work, str]]]") -> None:
        """Finish the oldest collective; if its transfer starts another one, that goes to the end of the queue."""
        transfer, started = under_way.popleft()
        self.wait(*started)
        following = next(transfer, None)
        if following is not None:
            under_way.append((transfer, following))
