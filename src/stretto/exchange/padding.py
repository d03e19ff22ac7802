"""Padding: the elements of buckets that belong to no parameter. They are zero, and stay so.

A wire that rotates a block adds noise to all of it, including padding. That noise would count in the norm of a
gradient, and masters would keep it.
"""

import torch
from torch import Tensor

from stretto.flat import Layout


class Padding:
    """Knows the padding of each bucket.

    Args:
        layout: Layout of the buckets; a layout without slots, as fragments have, does not describe padding.
        rank: Index of this rank's slice in a bucket.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self._layout = layout
        self._rank = rank
        self._places: list[tuple[Tensor, Tensor]] = []

    def clear(self, index: int, values: Tensor) -> Tensor:
        """Write zeros to the padding of a bucket, or of this rank's slice of it; return the argument."""
        if not self._places:
            self._places = self._found()
        whole, own = self._places[index]
        is_whole = values.numel() == self._layout.buckets[index].numel
        return values.index_fill_(0, whole if is_whole else own, 0.0)

    def _found(self) -> list[tuple[Tensor, Tensor]]:
        """Return, by bucket, the places of padding in it and in this rank's slice; a flat set is copied at once."""
        layout, slots = self._layout, self._layout.slots_by_bucket()
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for set_index, flat in enumerate(layout.sets):
            indices = [index for index, bucket in enumerate(layout.buckets) if bucket.set_index == set_index]
            places = []
            for index in indices:
                bucket = layout.buckets[index]
                is_padding = torch.full((bucket.numel,), bool(layout.slots))
                for slot in slots[index]:
                    first, last = max(slot.start, bucket.start), min(slot.stop, bucket.stop)
                    is_padding[first - bucket.start : last - bucket.start] = False
                own = is_padding.view(layout.world_size, -1)[self._rank]
                places += [some.nonzero().view(-1) for some in (is_padding, own)]
            if places:
                copies = torch.cat(places).to(flat.device).split([len(place) for place in places])
                found |= zip(indices, zip(copies[::2], copies[1::2], strict=True), strict=True)
        return [found[index] for index in range(len(layout.buckets))]
