"""N-dimensional boxes that cover a run of elements."""

import dataclasses
import math
from collections.abc import Iterator, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor that is contiguous in row-major order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """First element in the flattened tensor."""
    numel: int


def whole(shape: Sequence[int]) -> Box:
    """Return the box that is all of a tensor, also of one without dimensions or without elements."""
    return Box((0,) * len(shape), tuple(shape), 0, math.prod(shape))


def cover(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield, in order, at most `2 * len(shape) - 1` disjoint boxes that hold the elements `start` to `stop`.

    A run begins in the middle of a row, goes on over whole rows, and ends in the middle of a row; what lies
    in one row is a run of a tensor with one dimension less.

    Args:
        shape: Of the tensor.
        start: First element in row-major order.
        stop: One past the last.
    """
    if start >= stop:
        return
    if not shape:
        yield whole(shape)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        yield from _within(shape, last, start, stop)
        return
    yield from _within(shape, first - 1, start, first * row)
    if first < last:
        rest = (0,) * (len(shape) - 1)
        yield Box((first, *rest), (last - first, *shape[1:]), first * row, (last - first) * row)
    yield from _within(shape, last, last * row, stop)


def _within(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of a run that stays in row `index`."""
    base = index * math.prod(shape[1:])
    for box in cover(shape[1:], start - base, stop - base):
        yield Box((index, *box.offsets), (1, *box.sizes), box.start + base, box.numel)
