"""The verified exchange: every row carries a seal, a digest by which the receiver checks what arrived.

Damaged rows are sent again, and sums are computed twice, before anything is used.
"""

import struct
from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor
from torch import distributed as dist

from stretto.checksums import digest, hexadecimal, same_bytes
from stretto.errors import CorruptionError, TransferCorrupt
from stretto.exchange.exchange import Add, Change, Exchange, Transfer, Transfers, Wait
from stretto.exchange.repeats import REPEATS, Delivery, Missing, complete
from stretto.exchange.wire import PackedWire, PlainWire, Wire
from stretto.flat import Layout
from stretto.records import Incident

_COPIES = 3
"""Copies of every record of the round report: ranks need the records to agree on anything, even on a repeat."""


class VerifiedExchange(Exchange):
    """An exchange in which every row travels with its digest.

    A *row* is what one rank sends to another of one bucket. Its *seal*, eight bytes behind it, is a digest over the
    bytes and over what they are: which exchange, which bucket, from whom and for whom. A stale, swapped or misrouted
    row thus counts as damaged, like a changed one. Damaged rows are sent again (`stretto.exchange.repeats`) before
    anything is used.

    Note [Sealed from the source, checked at the end]
        A sender keeps the buffer that it seals its rows from, so a repeat takes the values from there. A receiver
        sums twice, compares to the bit, and checks the seals afterwards: a row that changed in its memory before or
        between the sums is noticed too. What makes both sums wrong in the same way hits a run of them, a page or a
        whole slice: so a sample of every sum has to lie within its rounding of a sum in float64.
    """

    is_verified = True

    def __init__(self, group: dist.ProcessGroup, layout: Layout, wire: Wire, wait: Wait) -> None:
        super().__init__(group, layout, wire, wait)
        self._phase = 0
        """Reductions and gathers so far, the same on all ranks: part of every row's seal."""
        self._records = 0
        """Round reports so far: part of every record's seal."""
        self._sent: Sequence[Wire] = self._contributed
        """The format in which the present phase sends contributions, by flat set."""
        self._missing: list[Missing] = []
        """What this rank misses of the present phase."""
        self._held: dict[int, Tensor] = {}
        """Rows of buckets of which some are missing, by bucket."""

    def summing(
        self, flats: Sequence[Tensor], sums: Sequence[Tensor], *, whole: bool, wire: PlainWire | None = None
    ) -> Transfers:
        """Sum `flats` over ranks and repeat damaged rows: a reduce-scatter, then a gather of the owners' sums."""
        # Each owner's slice lies where the gather writes it, so the gather overwrites it with the same values.
        slices = [total.view(self.world_size, -1)[self.rank] for total in sums] if whole else sums
        back = [(wire or self.wire.values).of(flat.dtype) for flat in flats]
        sent = self._contributed if wire is None else back
        self._begin_phase()
        self._sent = sent

        def row(index: int, receiver: int) -> Tensor:
            flat = flats[self.layout.buckets[index].set_index]
            empty = torch.empty(sizes[index], dtype=torch.uint8, device=flat.device)
            return self._contribution(empty, index, flat, receiver)

        def accept(arrived: dict[Missing, Tensor]) -> list[Missing]:
            self._missing = []
            for missing, content in arrived.items():
                self._held[missing.index].view(self.world_size, -1)[missing.sender].copy_(content)
            for index in dict.fromkeys(missing.index for missing in arrived):
                self._settle(index, self._held.pop(index), slices[index])
            return self._missing

        sizes = [
            self._row_bytes(bucket.numel // self.world_size, sent[bucket.set_index])
            for bucket in self.layout.buckets
        ]
        yield from super().summing(flats, slices, whole=False)
        complete(self, self._missing, Delivery(site="contribution", row_bytes=sizes, row=row, accept=accept))
        if whole:
            self._gather(slices, sums, [back[bucket.set_index] for bucket in self.layout.buckets])

    def all_gather(self, flats: Sequence[Tensor], formats: Sequence[PlainWire]) -> None:
        """Replace every bucket of `flats` by the owners' slices, and repeat damaged rows."""
        buckets = self.layout.buckets
        owned = [slice(*bucket.owned_range(self.rank, self.world_size)) for bucket in buckets]
        self._gather(
            [flats[bucket.set_index][own] for bucket, own in zip(buckets, owned, strict=True)],
            [flats[bucket.set_index][bucket.start : bucket.stop] for bucket in buckets],
            [formats[bucket.set_index] for bucket in buckets],
        )

    def gather_changes(self, wire: PackedWire, change: Change, add: Add) -> None:
        """Gather what every owner has to add to its slices, and repeat damaged rows before anything is added."""
        wholes = []
        for bucket in self.layout.buckets:
            device = self.layout.sets[bucket.set_index].device
            wholes.append(torch.empty(wire.num_bytes(bucket.numel), dtype=torch.uint8, device=device))
        owned = [whole.view(self.world_size, -1)[self.rank] for whole in wholes]
        for index, own in enumerate(owned):
            wire.write(change(index), own)
        self._gather(owned, wholes, [PlainWire("", torch.uint8)] * len(wholes))
        for index, whole in enumerate(wholes):
            add(index, wire.read(whole))

    def gather_values(self, own: Tensor, whole: Tensor, what: str) -> None:
        """Gather every rank's `own` into `whole`, and repeat damaged rows."""
        self._gather([own], [whole], [PlainWire("", own.dtype)])

    def gather_bytes(self, record: bytes) -> list[bytes]:
        """Return every rank's `record`, in rank order; every record travels three times, each with its seal.

        Raises:
            TransferCorrupt: All three copies of some rank's record are damaged.
        """
        self._records += 1
        sealed = seal_bytes(record, seed_of(self._records, self.rank))
        arrived = super().gather_bytes(sealed * _COPIES)
        found = [self._read(content, len(sealed), sender) for sender, content in enumerate(arrived)]
        if lost := [sender for sender, content in enumerate(found) if content is None]:
            raise TransferCorrupt(
                f"rank {self.rank}: all {_COPIES} copies of a round report from ranks {lost} are damaged: "
                f"expected one to fit its seal; look at the links from them to rank {self.rank}",
                links=[(sender, self.rank) for sender in lost],
            )
        return [content for content in found if content is not None]

    def sum_slice(self, index: int, flat: Tensor, total: Tensor, wire: PlainWire | None = None) -> Transfer:
        """Sum the rows of a bucket into this rank's slice; keep a bucket with a missing row for the repeat."""
        row_bytes = self._row_bytes(total.numel(), self._sent[self.layout.buckets[index].set_index])
        size = self.world_size * row_bytes
        outgoing = self.scratch("outgoing", index, size, torch.uint8, flat.device)
        for receiver, row in enumerate(outgoing.view(self.world_size, -1)):
            self._contribution(row, index, flat, receiver)
        received = self.scratch("received", index, size, torch.uint8, flat.device)
        self.sent_bytes += row_bytes * (self.world_size - 1)
        yield self.group.alltoall_base(received, outgoing, [], []), f"reduction of bucket {index}"
        self._settle(index, received, total)

    def _gather(self, owned: Sequence[Tensor], wholes: Sequence[Tensor], wires: Sequence[PlainWire]) -> None:
        """Gather every rank's `owned` into `wholes`, each in its format on the wire."""
        self._begin_phase()
        sizes = [self._row_bytes(own.numel(), wire) for own, wire in zip(owned, wires, strict=True)]

        def sealed(index: int, memory: Tensor) -> Tensor:
            return seal(memory, owned[index], wires[index], seed_of(self._phase, index, self.rank))

        def row(index: int, _: int) -> Tensor:
            return sealed(index, torch.empty(sizes[index], dtype=torch.uint8, device=owned[index].device))

        def install(index: int, sender: int, content: Tensor) -> None:
            # A damaged copy of this rank's own row must not overwrite the values that a repeat is made from.
            if self._is_sound("gathered values", index, sender, content, seed_of(self._phase, index, sender)):
                part = wholes[index].view(self.world_size, -1)[sender]
                own, wire = owned[index], wires[index]
                # This rank's own row is already there, unless the wire has made it narrower.
                if sender != self.rank or part.data_ptr() != own.data_ptr() or wire.dtype != own.dtype:
                    part.copy_(values_of(content, wire))

        def transfer(index: int) -> Transfer:
            device = owned[index].device
            own = sealed(index, self.scratch("sealed", index, sizes[index], torch.uint8, device))
            received = self.scratch("whole", index, self.world_size * sizes[index], torch.uint8, device)
            self.sent_bytes += (self.world_size - 1) * own.nbytes
            yield self.group.all_gather_single(received, own), f"gather of bucket {index}"
            for sender, content in enumerate(received.view(self.world_size, -1)):
                install(index, sender, content)

        def accept(arrived: dict[Missing, Tensor]) -> list[Missing]:
            self._missing = []
            for missing, content in arrived.items():
                install(missing.index, missing.sender, content)
            return self._missing

        self.perform(transfer(index) for index in range(len(owned)))
        complete(
            self, self._missing, Delivery(site="gathered values", row_bytes=sizes, row=row, accept=accept)
        )

    def _contribution(self, row: Tensor, index: int, flat: Tensor, receiver: int) -> Tensor:
        """Write this rank's sealed contribution to `receiver`'s slice of a bucket into `row`, and return it."""
        bucket = self.layout.buckets[index]
        values = flat[slice(*bucket.owned_range(receiver, self.world_size))]
        wire = self._sent[bucket.set_index]
        return seal(row, values, wire, seed_of(self._phase, index, self.rank, receiver))

    def _settle(self, index: int, received: Tensor, total: Tensor) -> None:
        """Sum the rows of a bucket into `total` and check them; put them aside if one is missing."""
        rows = received.view(self.world_size, -1)
        wire = self._sent[self.layout.buckets[index].set_index]
        values = [values_of(row, wire) for row in rows]
        self._sum_twice(index, values, total)
        sound = [
            self._is_sound("contribution", index, sender, row, seed_of(self._phase, index, sender, self.rank))
            for sender, row in enumerate(rows)
        ]
        if not all(sound):
            self._held[index] = received.clone()

    def _sum_twice(self, index: int, values: Sequence[Tensor], total: Tensor) -> None:
        """Sum `values` until two sums in a row are equal to the bit, and plausible.

        Where two have differed, what did that may also make single elements alike: from then on all are looked at.
        """
        self.add_up(values, total)
        again = self.scratch("again", index, total.numel(), total.dtype, total.device)
        looked_at = list(map(sampled, values)), sampled(total)
        for _ in range(REPEATS + 1):
            self.add_up(values, again)
            if same_bytes(total, again) and is_plausible_sum(*looked_at):
                return
            looked_at = list(values), total
            self._report("sum", f"bucket {index}", self.rank, "summed again", digest(again), digest(total))
            total.copy_(again)
        raise CorruptionError(
            f"rank {self.rank}: the sum of bucket {index} came out wrong or differently {REPEATS + 2} times: expected "
            "the same bits from the same contributions; take this rank's device out of the job",
            ranks=[self.rank],
        )

    def _is_sound(self, site: str, index: int, sender: int, row: Tensor, seed: int) -> bool:
        """Return whether a row fits its seal; if not, note that it is missing."""
        expected, found = opened(row, seed)
        if found == expected:
            return True
        self._missing.append(Missing(self.rank, sender, index))
        self._report(site, f"bucket {index}", sender, "sent again", expected, found)
        return False

    def _read(self, content: bytes, sealed_bytes: int, sender: int) -> bytes | None:
        """Return the record in one of the copies whose seal fits; None where none does."""
        seed = seed_of(self._records, sender)
        copies = [content[i * sealed_bytes : (i + 1) * sealed_bytes] for i in range(_COPIES)]
        sound = [copy for copy in copies if seal_bytes(copy[:-SEAL_BYTES], seed) == copy]
        if not sound:
            return None
        if len(sound) < _COPIES:
            self._report(
                "round report", f"{_COPIES - len(sound)} of {_COPIES} copies", sender, "read from a copy"
            )
        return sound[0][:-SEAL_BYTES]

    def _begin_phase(self) -> None:
        self._phase += 1
        self._missing = []

    def _row_bytes(self, numel: int, wire: Wire) -> int:
        return wire.num_bytes(numel) + SEAL_BYTES

    def _report(self, site: str, part: str, sender: int, action: str, *digests: int) -> None:
        expected, found = map(hexadecimal, digests) if digests else (None, None)
        self.incidents.append(
            Incident(
                step=0,
                guard="verified",
                site=site,
                part=part,
                ranks=(sender,),
                link=None if site == "sum" else (sender, self.rank),
                action=action,
                expected=expected,
                found=found,
            )
        )


SEAL_BYTES = 8
"""A 64-bit digest; keeps the rows behind it aligned for any dtype."""


_LOOKED_AT, _EVERY = 16, 256
"""Elements of a sum that are looked at, of as many each: one cache line of float32 in sixteen."""


def sampled(values: Tensor) -> Tensor:
    """Return a view of some of `values`, `(n, 16)`, or all where there are few: at least one of any 256 in a row."""
    return values if values.numel() < _LOOKED_AT else values.unfold(0, _LOOKED_AT, _EVERY)


def is_plausible_sum(values: Sequence[Tensor], total: Tensor) -> bool:
    """Return whether a sum lies within its rounding of the sum in float64.

    For every element  |total − Σ v| ≤ n ε Σ |v|  (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2);
    an element that may overflow counts as plausible.

    Args:
        values: The n contributions, in the shape of `total`.
        total: Their sum.
    """
    exact = torch.zeros_like(total, dtype=torch.float64)
    size = torch.zeros_like(exact)
    for value in values:
        exact += value
        size += value.abs()
    numbers = torch.finfo(total.dtype)
    is_near = (total - exact).abs() <= len(values) * numbers.eps * size
    return bool((is_near | ~(size <= numbers.max)).all())


def seed_of(*what: int) -> int:
    """Return a seed that identifies a row, so that the right bytes in the wrong place do not match their seal."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(what)}Q", *what))


def seal(row: Tensor, values: Tensor, wire: Wire, seed: int) -> Tensor:
    """Write `values` and their seal into `row`, and return it.

    Args:
        row: `(wire.num_bytes(values.numel()) + SEAL_BYTES,)` uint8; overwritten.
        values: The values to send.
        wire: The format in which they travel.
        seed: Identifies the row, from `seed_of`.
    """
    content = row[:-SEAL_BYTES]
    wire.write(values, content)
    mark = bytearray(digest(content, seed).to_bytes(SEAL_BYTES, "little"))
    row[-SEAL_BYTES:].copy_(torch.frombuffer(mark, dtype=torch.uint8))
    return row


def opened(row: Tensor, seed: int) -> tuple[int, int]:
    """Return the digest that a row's seal holds, and the one that its values have."""
    expected = int.from_bytes(row[-SEAL_BYTES:].cpu().numpy().tobytes(), "little")
    return expected, digest(row[:-SEAL_BYTES], seed)


def values_of(row: Tensor, wire: Wire) -> Tensor:
    """Return a row's values; a view where the format is plain."""
    return wire.read(row[:-SEAL_BYTES])


def seal_bytes(record: bytes, seed: int) -> bytes:
    """Return a record with its seal behind it."""
    return record + xxhash.xxh3_64_intdigest(record, seed=seed).to_bytes(SEAL_BYTES, "little")
