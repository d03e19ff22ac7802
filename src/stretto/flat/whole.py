"""The positions of tensors that may not be cut: each in one slice, with slices as equal as possible.

Note [Whole tensors]
    Tensors come in the order in which their gradients arrive. A bucket takes them until it is full, and until its
    longest slice L is at most 10 % longer than the mean slice; it has W·L elements then, the rest of them padding.
    Within a bucket the longest tensor comes first, and each goes to the slice that is shortest so far. The bucket
    that remains at the end is joined with the bucket before, repeatedly, until it too is even enough. So either no
    more than 10 % of a set's content is added, or the set is one bucket. By Graham's bound (SIAM J. Appl. Math. 17,
    1969) one bucket has at most W - 1 times its longest tensor on top of its content: it is the price of a tensor
    that is larger than a rank's share of everything.
"""

import heapq
from collections.abc import Sequence
from itertools import accumulate

ALIGNMENT = 64
"""Alignment in elements; a multiple of the widest vector unit times the unrolling of PyTorch's fused CPU optimizers."""
# Largest ratio of the longest slice to the mean slice.
_LONGEST = 1.1


def place_whole(
    sizes: Sequence[int], numel_full: int, world_size: int, parts: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the start of every tensor, each within one slice, and start and length of every bucket.

    Args:
        sizes: Elements of every tensor, in order of arrival.
        numel_full: Elements at which a bucket is full.
        world_size: Number of slices of a bucket.
        parts: A bucket is also full once it has one part of all elements, of so many.
    """
    padded = [round_up(numel, ALIGNMENT) for numel in sizes]
    numel_full = min(numel_full, -(-sum(padded) // parts))
    buckets: list[list[int]] = [[]]
    content = 0
    for index, numel in enumerate(padded):
        buckets[-1].append(index)
        content += numel
        if content >= numel_full and _is_even(buckets[-1], padded, world_size):
            buckets.append([])
            content = 0
    while len(buckets) > 1 and not _is_even(buckets[-1], padded, world_size):
        last = buckets.pop()
        buckets[-1] += last
    starts, cuts, begin = [0] * len(sizes), [], 0
    for members in buckets:
        slices = _slices(members, padded, world_size)
        each = max(ALIGNMENT, _longest(slices, padded))  # something to send even if all tensors are empty
        for rank, inside in enumerate(slices):
            for index, before in zip(
                inside, accumulate((padded[i] for i in inside), initial=0), strict=False
            ):
                starts[index] = begin + rank * each + before
        cuts.append((begin, world_size * each))
        begin += world_size * each
    return starts, cuts


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is not below `value`."""
    return -(-value // multiple) * multiple


def _slices(members: Sequence[int], padded: Sequence[int], world_size: int) -> list[list[int]]:
    """Deal tensors to slices, the longest first, each to the slice that is shortest so far."""
    slices: list[list[int]] = [[] for _ in range(world_size)]
    lengths = [(0, rank) for rank in range(world_size)]
    for index in sorted(members, key=lambda index: -padded[index]):
        length, rank = lengths[0]
        slices[rank].append(index)
        heapq.heapreplace(lengths, (length + padded[index], rank))
    return slices


def _longest(slices: Sequence[Sequence[int]], padded: Sequence[int]) -> int:
    return max(sum(padded[index] for index in inside) for inside in slices)


def _is_even(members: Sequence[int], padded: Sequence[int], world_size: int) -> bool:
    """Return whether the longest slice is little longer than the mean; empty slices are not even."""
    sizes = [padded[index] for index in members]
    allowed = _LONGEST * sum(sizes) / world_size
    if max(sizes, default=0) > allowed:  # what a single tensor decides need not be dealt
        return False
    return 0 < _longest(_slices(members, padded, world_size), padded) <= allowed
