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
        self._places: list[tuple[Tensor, Tensor]] = []

    def clear(self, index: int, values: Tensor) -> Tensor:
        """Write zeros to the padding of a bucket, or of this rank's slice of it; return what it was given."""
        if not self._places:
            self._places = self._found()
        whole, own = self._places[index]
        is_whole = values.numel() == self._layout.buckets[index].numel
        return values.index_fill_(0, whole if is_whole else own, 0.0)

    def _found(self) -> list[tuple[Tensor, Tensor]]:
        """Return, by bucket, the places of padding in it and in this rank's slice of it; one copy to each device."""
        layout, places = self._layout, []
        for index, bucket in enumerate(layout.buckets):
            is_padding = torch.full((bucket.numel,), bool(layout.slots))
            for slot in self._slots_by_bucket[index]:
                first, last = max(slot.start, bucket.start), min(slot.stop, bucket.stop)
                is_padding[first - bucket.start : last - bucket.start] = False
            of_owner = is_padding.view(layout.world_size, -1)[self._rank]
            places += [some.nonzero().view(-1) for some in (is_padding, of_owner)]
        sizes = [len(place) for place in places]
        devices = {flat.device for flat in layout.sets}
        copies = {device: torch.cat(places).to(device).split(sizes) for device in devices} if places else {}
        return [
            (there[2 * index], there[2 * index + 1])
            for index, bucket in enumerate(layout.buckets)
            for there in (copies[layout.sets[bucket.set_index].device],)
        ]
