"""Who writes which elements of every parameter into a checkpoint."""

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from stretto.flat.boxes import Box, cover, whole
from stretto.flat.layout import Layout, Slot
from stretto.flat.parted import Part, PartedTensor

Fragments = Sequence[tuple[int, Tensor]]
"""Runs of one parameter's elements that this rank holds: first element, and values `(numel,)`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """A run of one parameter's elements that one rank writes."""

    rank: int
    start: int
    stop: int


class Shares:
    """The shares of all ranks: what each owns, or would own where every rank holds everything.

    A parameter's boxes follow from the shares alone, so every rank cuts it alike.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self.rank = rank
        self._of_slot = [list(_shares_of(layout, slot)) for slot in layout.slots]

    def cut(
        self, slot: Slot, dtype: torch.dtype, fragments: Fragments = (), *, everywhere: bool
    ) -> PartedTensor:
        """Return something that has the shape of a parameter, in parts.

        Args:
            slot: The parameter.
            dtype: Of the values.
            fragments: Those that this rank has.
            everywhere: Whether this rank wants all of it, or only its own share.
        """
        parts = [
            Part(box, _find(fragments, box), share.rank == self.rank)
            for share in self._of_slot[slot.index]
            if everywhere or share.rank == self.rank
            for box in _boxes(slot, share)
        ]
        return PartedTensor(slot.shape, dtype, parts)

    def uncut(self, value: Tensor, *, blank: bool, alike: bool) -> PartedTensor:
        """Return something that is not cut.

        Args:
            value: Its shape, its dtype and, unless blank, its values.
            blank: Leave the values out.
            alike: Whether all ranks hold the same values, so that any may write them; otherwise rank 0 does.
        """
        flat = None if blank else value.detach().reshape(-1)
        return PartedTensor(
            value.shape, value.dtype, [Part(whole(value.shape), flat, alike or self.rank == 0)]
        )

    def number(self, slot: Slot, dtype: torch.dtype, value: Tensor | None) -> PartedTensor:
        """Return a number that belongs to a parameter; whoever writes its first element writes it."""
        writer = self._of_slot[slot.index][0].rank
        flat = None if value is None else value.reshape(1)
        return PartedTensor((), dtype, [Part(whole(()), flat, writer == self.rank)])


def _shares_of(layout: Layout, slot: Slot) -> Iterator[Share]:
    if slot.numel == 0:
        yield Share(0, 0, 0)
    for bucket in layout.buckets:
        low, high = max(slot.start, bucket.start), min(slot.stop, bucket.stop)
        if bucket.set_index != slot.set_index or low >= high:
            continue
        each = bucket.numel // layout.world_size
        for rank in range((low - bucket.start) // each, (high - 1 - bucket.start) // each + 1):
            start, stop = bucket.owned_range(rank, layout.world_size)
            yield Share(rank, max(low, start) - slot.start, min(high, stop) - slot.start)


def _boxes(slot: Slot, share: Share) -> Iterator[Box]:
    if slot.numel == 0:
        yield whole(slot.shape)
    yield from cover(slot.shape, share.start, share.stop)


def _find(fragments: Fragments, box: Box) -> Tensor | None:
    for start, values in fragments:
        if start <= box.start and box.start + box.numel <= start + values.numel():
            return values[box.start - start : box.start - start + box.numel]
    return None
