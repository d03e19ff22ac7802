"""Which parts of parameters a rank owns, and the runs of them that a private optimizer sees as one tensor."""

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import groupby

from torch import Tensor

from stretto.flat import ALIGNMENT, Layout, Slot


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """The part of one parameter that lies in one bucket's owned slice."""

    slot: Slot
    bucket: int
    """Index of the bucket."""
    start: int
    """First element within the owned slice; a multiple of `ALIGNMENT`."""
    offset: int
    """First element within the flattened parameter."""
    numel: int

    @property
    def padded_stop(self) -> int:
        """One past the last element within the owned slice, with the padding up to the next slot."""
        return self.start + -(-self.numel // ALIGNMENT) * ALIGNMENT


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A run of one bucket's owned slice whose elements the optimizer treats alike."""

    bucket: int
    """Index of the bucket."""
    group: int
    """Index of the parameter group."""
    pieces: tuple[Piece, ...]
    """What lies in the run, in order."""
    start: int
    """First element within the owned slice."""
    stop: int
    """One past the last element within the owned slice; with padding, but for a whole tensor."""
    master: Tensor
    """View of the masters; what the private optimizer steps. `(stop - start,)`, or the shape of a whole tensor."""


def owned_pieces(layout: Layout, rank: int, num_owners: int) -> Iterator[Piece]:
    """Yield the pieces of parameters that `rank` owns, bucket by bucket in flat order."""
    for index, bucket in enumerate(layout.buckets):
        low, high = bucket.owned_range(rank, num_owners)
        for slot in layout.slots_of_set(bucket.set_index):
            start, stop = max(slot.start, low), min(slot.stop, high)
            if start < stop:
                yield Piece(slot, index, start - low, start - slot.start, stop - start)


def segment_of(pieces: Sequence[Piece], masters: Sequence[Tensor]) -> Segment:
    """Return the segment over neighbouring pieces of one bucket and group, or over one whole tensor."""
    first, start = pieces[0], pieces[0].start
    stop = start + first.numel if first.slot.is_whole else pieces[-1].padded_stop
    shape = first.slot.shape if first.slot.is_whole else (stop - start,)
    master = masters[first.bucket][start:stop].view(shape)
    return Segment(first.bucket, first.slot.group, tuple(pieces), start, stop, master)


def segment_key(piece: Piece) -> tuple[int, int, int]:
    """Return what neighbouring pieces of one segment have in common; a whole tensor has no neighbours."""
    return piece.bucket, piece.slot.group, piece.slot.index if piece.slot.is_whole else -1


def cut_segments(pieces: Sequence[Piece], masters: Sequence[Tensor]) -> list[Segment]:
    """Cut the owned pieces into as few segments as buckets, groups and whole tensors allow."""
    return [segment_of(list(run), masters) for _, run in groupby(pieces, key=segment_key)]
