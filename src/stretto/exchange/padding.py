"""Padding: the elements of buckets that belong to no parameter. They are zero, and stay so.

A wire that rotates a block brings noise to all of it. It would count in the norm of a gradient, and masters would
remember it.
"""

import torch
from torch import Tensor

from stretto.flat import Layout


class Padding:
    """Knows the padding of each bucket.

    Args:
        layout: Of the buckets; one without slots, as fragments have, says nothing of padding.
        rank: Which of the slices of a bucket is this rank's.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self._layout = layout
        self._rank = rank
        self._slots_by_bucket = layout.slots_by_bucket()
        self._places: dict[int, tuple[Tensor, Tensor]] = {}

    def clear(self, index: int, values: Tensor) -> Tensor:
        """Write zeros to the padding of a bucket, or of this rank's slice of it; return what it was given."""
        whole, own = self._of(index)
        is_whole = values.numel() == self._layout.buckets[index].numel
        return values.index_fill_(0, whole if is_whole else own, 0.0)

    def _of(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the places of padding in a bucket, and in this rank's slice of it."""
        if index not in self._places:
            layout, bucket = self._layout, self._layout.buckets[index]
            is_padding = torch.full((bucket.numel,), bool(layout.slots))
            for slot in self._slots_by_bucket[index]:
                first, last = max(slot.start, bucket.start), min(slot.stop, bucket.stop)
                is_padding[first - bucket.start : last - bucket.start] = False
            of_owner = is_padding.view(layout.world_size, -1)[self._rank]
            device = layout.sets[bucket.set_index].device
            whole, own = (some.nonzero().view(-1).to(device) for some in (is_padding, of_owner))
            self._places[index] = whole, own
        return self._places[index]
