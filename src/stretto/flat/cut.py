"""Flat sets cut into their buckets: one call for each set, because a view by itself costs the host far more."""

from collections.abc import Sequence

from torch import Tensor

from stretto.flat.layout import Layout


class Cut:
    """Cuts the flat sets of one layout, whose buckets lie side by side."""

    def __init__(self, layout: Layout) -> None:
        order = sorted(range(len(layout.buckets)), key=lambda index: layout.buckets[index].start)
        members = [[i for i in order if layout.buckets[i].set_index == s] for s in range(len(layout.sets))]
        self._numels = [[layout.buckets[index].numel for index in inside] for inside in members]
        places = {index: place for place, index in enumerate(index for inside in members for index in inside)}
        self._places = [places[index] for index in range(len(layout.buckets))]

    def __call__(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return views of `flats`, one tensor per flat set, by bucket."""
        cut = [
            view
            for flat, numels in zip(flats, self._numels, strict=True)
            for view in flat.split_with_sizes(numels)
        ]
        return [cut[place] for place in self._places]
