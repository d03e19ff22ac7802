"""The verified exchange: every row carries a seal, a digest by which the receiver checks the row.

Sums are computed twice, and buckets with a damaged row are sent again, before anything is used.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stretto.checksums import Digest, Digests, hexadecimal, on_host, same_bytes
from stretto.errors import CorruptionError, TransferCorrupt
from stretto.exchange.exchange import Exchange
from stretto.exchange.missing import Missing, missing_anywhere
from stretto.exchange.rows import (
    SEAL_BYTES,
    Rows,
    seal_bytes,
    seed_of,
    seeds_from_senders,
    seeds_to_receivers,
)
from stretto.exchange.scratch import IN_FLIGHT
from stretto.exchange.sums import is_plausible_sum, sampled
from stretto.exchange.transfer import Level, Place, Transfer, Transfers, filled
from stretto.exchange.wire import PlainWire, Wire
from stretto.records import Incident

REPEATS = 3
"""How often a damaged bucket is sent again; four failures in a row are not accidental."""
# Copies of every record of the round report: ranks need the records to agree on anything, including a repeat.
_COPIES = 3
_as_stored = cache(partial(PlainWire, ""))


class _Arrived(NamedTuple):
    """The rows of a bucket that have arrived on one level, or a sum of them, before they are checked."""

    site: str
    bucket: int
    """Its index."""
    where: str
    """The level's, for messages."""
    senders: Sequence[int]
    expected: Digest | Digests
    """By sender; of a sum, that it is right."""
    found: Digest | Digests
    """Differs from `expected` where something is damaged."""


class VerifiedExchange(Exchange):
    """An exchange in which every row is sent with its digest.

    A *row* is one rank's values of one bucket for another rank, on one level. Its *seal*, eight bytes after it, is a
    digest over the bytes and over what they are: which exchange, which bucket, from whom and for whom. A stale,
    swapped or misrouted row thus counts as damaged, like a changed one.

    Note [Sealed from the source, checked at the end]
        A receiver sums twice, compares to the bit, and checks the seals afterwards: a row that changed in its memory
        before or between the sums is noticed too. What makes both sums wrong in the same way hits a run of them, a page
        or a whole slice: so a sample of every sum has to be within its rounding of a sum in float64. Where a sum came
        out wrong, the same may also make single elements alike: when it is repeated, all are looked at.

    Note [Repeats]
        A *phase* is the sums of all buckets, or a gather of all. The results of its checks stay on the device until
        its end; the host reads them once. Then comes a small gather: how many rows and sums does each rank miss? If
        none are missing, the phase is over. Otherwise every rank learns who misses what, and all ranks run the
        transfers of those buckets again, on all levels, because values from a damaged row may have been passed on in
        undamaged rows. Until then sources are not changed: the buffers of contributions, and an owner's slice, which
        no sent copy replaces. After `REPEATS` repeats every rank raises the same error.
    """

    is_verified = True

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        # Phases so far, each repeat counted: the same on all ranks, and part of every row's seal.
        self._attempts = 0
        # Round reports so far: part of every record's seal.
        self._records = 0
        # Rows that have arrived in the present phase, or its repeat.
        self._arrived: list[_Arrived] = []
        # Rows in scratch memory, by role and place in it, and device.
        self._held: dict[tuple[str, int, torch.device], Rows] = {}
        # Buckets whose sum came out wrong on this rank in the present phase.
        self._doubted: set[int] = set()

    def summing(
        self, flats: Sequence[Tensor], sums: Sequence[Tensor], *, whole: bool, wire: PlainWire | None = None
    ) -> Transfers:
        """Sum `flats` over ranks and repeat damaged buckets: a reduce-scatter, then a gather of the owners' sums."""
        # Each owner's slice lies where the gather writes it, so the gather overwrites it with the same values.
        slices = [total.view(self.world_size, -1)[self.rank] for total in sums] if whole else sums
        self._begin_attempt()
        yield from super().summing(flats, slices, whole=False, wire=wire)
        yield "barrier"
        self._repeat(
            "contribution", lambda index: self.sum_slice(index, self.cut(flats)[index], slices[index], wire)
        )
        if whole:
            own = self.cut(flats)
            self.perform(
                [partial(self.gather_sum, index, own[index], sums[index], wire) for index in range(len(own))]
            )

    def sum_parts(self, level: Level, index: int, parts: Tensor, total: Tensor, sent: Wire) -> Transfer:
        """Send the ranks of a level their sealed parts; sum what comes, and note what of it is damaged."""
        ranks, count = level.ranks, len(level.ranks)
        own, first = ranks.index(self.rank), self._seed(level, index)
        kind = count, total.numel(), sent
        outgoing = self._rows("outgoing", index, kind, total.device)
        drawn = sent.drawn("sums", self.round_index, *[self.rank] * count)
        by_rank = parts.view(count, -1) if parts.dim() == 1 < count else parts
        outgoing.seal(by_rank, drawn, seeds_to_receivers(first, own))
        received = self._rows("received", index, kind, total.device)
        yield self.send(level, received.memory, outgoing.memory), f"reduction of bucket {index}{level.where}"
        terms = received.read("sums", self.round_index, ranks)
        again = self.scratch("again", index, total.numel(), total.dtype, total.device)
        for into in (total, again):
            self.add_up(terms.by_rank, into)
        is_doubted = index in self._doubted
        looked_at = (terms.values, total) if is_doubted else (terms.sampled, sampled(total))
        is_right = same_bytes(total, again) & is_plausible_sum(*looked_at)
        self._arrived.append(_Arrived("sum", index, level.where, [self.rank], True, is_right))
        # Behind the sums: a row that changes in its memory before or between them is noticed too.
        checked = received.opened(seeds_from_senders(first, own))
        self._arrived.append(_Arrived("contribution", index, level.where, ranks, *checked))

    def gather_parts(self, level: Level, index: int, own: Tensor, whole: Tensor, what: str) -> Transfer:
        """Send this rank's values, sealed, to the ranks of a level; note the damaged rows that arrive from them."""
        wire, numel = _as_stored(whole.dtype), own.numel()
        count, place, first = len(level.ranks), level.ranks.index(self.rank), self._seed(level, index)
        sealed = self._rows("sealed", index, (1, numel, wire), whole.device)
        sealed.seal(own, wire, seeds_to_receivers(first, place))
        received = self._rows("rows", index, (count, numel, wire), whole.device)
        yield from super().gather_parts(level, index, sealed.memory, received.memory, what)
        checked = received.opened(seeds_from_senders(first, 0))
        self._arrived.append(_Arrived("gathered values", index, level.where, level.ranks, *checked))
        if own is whole:  # a lone rank's
            return
        parts = whole.view(count, -1)
        for others in (slice(place), slice(place + 1, count)):
            parts[others].copy_(received.values[others])
        part = parts[place]
        if part.data_ptr() != own.data_ptr() or part.dtype != own.dtype:
            part.copy_(own)

    def perform(self, transfers: Sequence[Callable[[], Transfer]]) -> None:
        """Run gathers, one of every bucket in order, and repeat those with a damaged row."""
        self._begin_attempt()
        super().perform(transfers)
        self._repeat("gathered values", lambda index: transfers[index]())

    def gather_bytes(self, record: bytes, places: Sequence[Place] = ()) -> list[bytes]:
        """Return every rank's `record`, in rank order; every record is sent three times, each with its seal.

        Raises:
            TransferCorrupt: All three copies of some rank's record are damaged.
        """
        self._records += 1
        sealed = seal_bytes(filled(record, places), seed_of(self._records, self.rank))
        arrived = super().gather_bytes(sealed * _COPIES)
        found = [self._read(content, len(sealed), sender) for sender, content in enumerate(arrived)]
        if lost := [self.numbers[sender] for sender, content in enumerate(found) if content is None]:
            own = self.numbers[self.rank]
            raise TransferCorrupt(
                f"rank {own}: all {_COPIES} copies of a round report from ranks {lost} are damaged: expected "
                f"at least one copy to fit its seal; check the links from these ranks to rank {own}",
                links=[(sender, own) for sender in lost],
            )
        return [content for content in found if content is not None]

    def _repeat(self, site: str, transfer: Callable[[int], Transfer]) -> None:
        """Run transfers of buckets again until no rank misses a row of any; all ranks must call.

        Raises:
            TransferCorrupt: On every rank, naming senders and receivers.
            CorruptionError: On every rank, naming those whose sums come out wrong again and again.
        """
        for repeats in itertools.count():
            missing = missing_anywhere(self, self._look())
            if not missing:
                self._doubted.clear()
                return
            if repeats == REPEATS:
                numbers, where = self.numbers, f"rank {self.numbers[self.rank]}: "
                lost = [
                    dataclasses.replace(one, receiver=numbers[one.receiver], sender=numbers[one.sender])
                    for one in missing
                ]
                what = "; ".join(map(str, lost))
                if wrong := sorted({one.receiver for one in lost if one.is_sum}):
                    raise CorruptionError(
                        f"{where}sums are still wrong after {REPEATS} repeats: expected the same bits from the same "
                        f"contributions, in {what}; remove the device of ranks {wrong} from the job",
                        ranks=wrong,
                    )
                raise TransferCorrupt(
                    f"{where}{site} still damaged after {REPEATS} repeats: expected the values that the sender had "
                    f"sealed, found others in {what}; remove that rank or that link from the job",
                    links=sorted({(one.sender, one.receiver) for one in lost}),
                )
            self._begin_attempt()
            for index in sorted({lost.index for lost in missing}):
                super().perform([partial(transfer, index)])  # one at a time: any two may share scratch memory

    def _rows(self, role: str, index: int, kind: tuple[int, int, Wire], device: torch.device) -> Rows:
        """Return memory for the rows of a transfer; `kind` is as in `Rows`."""
        key, (count, numel, wire) = (role, index % IN_FLIGHT, device), kind
        if (held := self._held.get(key)) is None or held.kind != kind:
            num_bytes = count * (wire.num_bytes(numel) + SEAL_BYTES)
            held = self._held[key] = Rows(self.scratch(role, index, num_bytes, torch.uint8, device), kind)
        return held

    def _look(self) -> list[Missing]:
        """Return the damaged rows of this rank, and report them; the host reads all results at once."""
        seen = [one for one in self._arrived if isinstance(one.found, Tensor) or one.found != one.expected]
        numbers = iter(on_host([one for row in seen for one in (row.expected, row.found)]))
        missing = []
        for arrived in seen:
            count = len(arrived.senders)
            expected, found = [*itertools.islice(numbers, count)], [*itertools.islice(numbers, count)]
            if expected == found:
                continue
            for sender, *pair in zip(arrived.senders, expected, found, strict=True):
                if pair[0] != pair[1]:
                    missing.append(Missing(self.rank, sender, arrived.bucket, arrived.site == "sum"))
                    part = f"bucket {arrived.bucket}{arrived.where}"
                    if arrived.site == "sum":
                        self._doubted.add(arrived.bucket)
                        self._report("sum", part, sender, "summed again")
                    else:
                        self._report(arrived.site, part, sender, "sent again", *pair)
        return missing

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

    def _begin_attempt(self) -> None:
        self._attempts += 1
        self._arrived = []

    def _seed(self, level: Level, index: int) -> int:
        return seed_of(self._attempts, level.number, index)

    def _report(self, site: str, part: str, sender: int, action: str, *digests: int) -> None:
        expected, found = map(hexadecimal, digests) if digests else (None, None)
        named = self.numbers[sender]
        self.incidents.append(
            Incident(
                step=0,
                guard="verified",
                site=site,
                part=part,
                ranks=(named,),
                link=None if site == "sum" else (named, self.numbers[self.rank]),
                action=action,
                expected=expected,
                found=found,
            )
        )
