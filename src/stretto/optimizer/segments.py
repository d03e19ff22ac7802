"""The parts of parameters that a rank owns, and the runs of them that a private optimizer sees as one tensor."""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import groupby

from torch import Tensor

from stretto.flat import ALIGNMENT, Owned, Slices, Slot


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """The part of one parameter that is in one bucket's owned slice."""

    slot: Slot
    bucket: int
    """Index of the bucket."""
    start: int
    """First element within the owned slice; a multiple of `ALIGNMENT`."""
    offset: int
    """First element within the flattened parameter."""
    numel: int

    @property
    def padded(self) -> int:
        """Elements with the padding up to the next slot."""
        return -(-self.numel // ALIGNMENT) * ALIGNMENT


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A run of one block's owned slices whose elements the optimizer treats equally."""

    set_index: int
    block: int
    """Index of the block."""
    group: int
    """Index of the parameter group."""
    pieces: tuple[Piece, ...]
    """Parts of parameters in the run, in order."""
    start: int
    """First element within the set's owned slices."""
    stop: int
    """One past the last element within them; with padding, except for a whole tensor."""
    master: Tensor
    """View of the masters that the private optimizer steps; `(stop - start,)`, or the shape of a whole tensor."""


def owned_pieces(owned: Owned) -> Iterator[Piece]:
    """Yield the pieces of parameters that a rank owns, bucket by bucket."""
    layout = owned.layout
    for index, (bucket, (low, high)) in enumerate(zip(layout.buckets, owned.ranges, strict=True)):
        for slot in layout.slots_of_set(bucket.set_index):
            start, stop = max(slot.start, low), min(slot.stop, high)
            if start < stop:
                yield Piece(slot, index, start - low, start - slot.start, stop - start)


def segment_of(pieces: Sequence[Piece], owned: Owned, masters: Slices) -> Segment:
    """Return the segment over neighbouring pieces of one block and group, or over one whole tensor."""
    first, last, slot = pieces[0], pieces[-1], pieces[0].slot
    start = owned.offsets[first.bucket] + first.start
    stop = start + first.numel if slot.is_whole else owned.offsets[last.bucket] + last.start + last.padded
    shape = slot.shape if slot.is_whole else (stop - start,)
    master = masters.flats[slot.set_index][start:stop].view(shape)
    block = owned.block_of[first.bucket]
    return Segment(slot.set_index, block, slot.group, tuple(pieces), start, stop, master)


def cut_segments(
    pieces: Sequence[Piece],
    owned: Owned,
    masters: Slices,
    kind: Callable[[Piece], Hashable] = lambda _: None,
) -> list[Segment]:
    """Cut the owned pieces into as few segments as blocks, groups and whole tensors allow, block after block.

    Args:
        pieces: All pieces that the rank owns.
        owned: Their positions.
        masters: Their values.
        kind: Pieces with different values of it are in different segments.
    """

    def place(piece: Piece) -> tuple[int, int]:
        return piece.slot.set_index, owned.offsets[piece.bucket] + piece.start

    def key(piece: Piece) -> Hashable:
        # A whole tensor has no neighbours.
        one = piece.slot.index if piece.slot.is_whole else -1
        return owned.block_of[piece.bucket], piece.slot.group, one, kind(piece)

    runs = groupby(sorted(pieces, key=place), key=key)
    return [segment_of(list(run), owned, masters) for _, run in runs]
