"""The slices that one rank owns: all slices of a flat set are in one tensor, so that one call reaches them.

Note [Blocks]
    A flat set has many buckets, and a rank owns a slice of each. Its slices are side by side in one tensor, in flat
    order, so a launch for each set is enough for what concerns them all. What needs memory for a copy goes block by
    block: slices that are equally long, up to `usual_bucket_bytes`. In a flat set a block is a matrix with gaps between
    its rows, and without gaps where one rank owns everything.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from stretto.flat.layout import Bucket, Layout, usual_bucket_bytes


class Slices(list[Tensor]):
    """Values of a rank's slices, as a list by bucket: views of `flats`, each with its own version counter."""

    def __init__(
        self, flats: Sequence[Tensor], views: Iterable[Tensor], flat_order: Sequence[int] | None = None
    ) -> None:
        super().__init__(views)
        self.flat_order = flat_order or range(len(self))
        """Indices of the buckets in flat order; None if the list is in flat order."""
        self.flats = tuple(flats)
        """One tensor per flat set, its slices side by side in flat order."""


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Owned slices of one flat set; see Note [Blocks]."""

    set_index: int
    buckets: tuple[int, ...]
    """Indices of their buckets."""
    offset: int
    """First element in the set's tensor of slices."""
    start: int
    """First element in the flat set."""
    stride: int
    """Distance between two slices in the flat set."""
    count: int
    """Number of slices; 1 if they have no gaps between them."""
    length: int
    """Elements of each slice."""


class Owned:
    """The positions of one rank's slices.

    Args:
        layout: Layout of the flat sets.
        rank: The owner.
        num_owners: Number of owners.
    """

    def __init__(self, layout: Layout, rank: int, num_owners: int) -> None:
        self.layout = layout
        self.ranges = [bucket.owned_range(rank, num_owners) for bucket in layout.buckets]
        """Range in the flat set, by bucket."""
        self.offsets = [bucket.start // num_owners for bucket in layout.buckets]
        """First element in the set's tensor of slices, by bucket."""
        self._flat_order = layout.flat_order()
        self._numels = [flat.numel // num_owners for flat in layout.sets]
        self.numel = sum(self._numels)
        self.blocks = [
            self._block(run, num_owners)
            for index, flat in enumerate(layout.sets)
            for run in self._runs(index, num_owners, usual_bucket_bytes(flat.device) // 4)
        ]
        """All blocks, in flat order."""
        self.block_of = {bucket: i for i, block in enumerate(self.blocks) for bucket in block.buckets}
        """Index of the block in which a bucket's slice is."""

    def new(self) -> Slices:
        """Return zeros, at least as wide as float32."""
        return self.cut(
            [
                torch.zeros(numel, dtype=torch.promote_types(flat.dtype, torch.float32), device=flat.device)
                for numel, flat in zip(self._numels, self.layout.sets, strict=True)
            ]
        )

    def cut(self, flats: Sequence[Tensor]) -> Slices:
        """Return slices that are side by side in one tensor per flat set."""
        ranges = zip(self.layout.buckets, self.offsets, self.ranges, strict=True)
        # `data` is a view with a version counter of its own: a write to one bucket is none to the others.
        return Slices(
            flats,
            [flats[bucket.set_index].narrow(0, at, high - low).data for bucket, at, (low, high) in ranges],
            self._flat_order,
        )

    def _runs(self, set_index: int, num_owners: int, most: int) -> Iterator[list[int]]:
        """Yield the buckets of a set in flat order, in groups that fit a block."""
        members = [i for i, bucket in enumerate(self.layout.buckets) if bucket.set_index == set_index]
        run: list[int] = []
        elements = 0
        for index in sorted(members, key=lambda i: self.layout.buckets[i].start):
            bucket = self.layout.buckets[index]
            numel = bucket.numel // num_owners
            is_like = num_owners == 1 or not run or bucket.numel == self.layout.buckets[run[0]].numel
            if run and not (is_like and elements + numel <= most):
                yield run
                run, elements = [], 0
            run.append(index)
            elements += numel
        yield run

    def _block(self, run: Sequence[int], num_owners: int) -> Block:
        buckets: list[Bucket] = [self.layout.buckets[index] for index in run]
        first, numel = buckets[0], sum(bucket.numel for bucket in buckets) // num_owners
        count = 1 if num_owners == 1 else len(run)
        start, _ = self.ranges[run[0]]
        return Block(
            first.set_index, tuple(run), self.offsets[run[0]], start, first.numel, count, numel // count
        )
