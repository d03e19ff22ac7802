"""Tensors in parts, as `torch.distributed.checkpoint` writes and reads them, and which rank writes which part.

A rank owns runs of a parameter's flat elements, but PyTorch's format knows only N-dimensional boxes. So every run is
covered by a few boxes, and each box is one part of a `PartedTensor`.
"""

import copy
import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.errors import CheckpointError
from stretto.flat.layout import Layout, Slot
from stretto.flat.shards import Shard, shard_of


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor that is contiguous in row-major order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """First element in the flattened tensor."""
    numel: int


def whole(shape: Sequence[int]) -> Box:
    """Return the box that covers a whole tensor, which may have no dimensions or no elements."""
    return Box((0,) * len(shape), tuple(shape), 0, math.prod(shape))


def cover(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield, in order, at most `2 * len(shape) - 1` disjoint boxes that hold the elements `start` to `stop`.

    A run begins in the middle of a row, goes on over whole rows, and ends in the middle of a row. The part in one row
    is a run of a tensor with one dimension less.

    Args:
        shape: Shape of the tensor.
        start: First element in row-major order.
        stop: One past the last element.
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


@dataclasses.dataclass(slots=True)
class Part:
    """One box of a tensor."""

    box: Box
    value: Tensor | None
    """`(box.numel,)`; None if there is no value yet: such a part is not written, and is allocated when it is read."""
    is_written_here: bool
    """Whether this rank offers to write the part; the planner chooses one of the ranks that do."""

    def fill(self, value: Tensor) -> None:
        """Give a part without a value its values, `(box.numel,)`."""
        self.value = value


class PartedTensor(Tensor):
    """The shape and dtype of a whole tensor, and the parts of it that this rank writes or reads.

    It has no storage of its own and no arithmetic. `dcp.save` writes the parts that this rank has to write, and
    `dcp.load` reads all parts; both use the last three methods with double underscores. A part is the same box for
    writing and reading, on every rank.
    """

    parts: dict[tuple[int, ...], Part]
    """By offsets."""
    shard: Shard
    """What of it belongs into this rank's model: all of it, unless ranks of a node share the tensor."""

    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, parts: Iterable[Part], shard: Shard | None = None
    ) -> "PartedTensor":
        """Make the tensor; parts must be disjoint."""
        self: PartedTensor = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)
        self.parts = {part.box.offsets: part for part in parts}
        self.shard = shard or Shard(tuple(shape), 0, tuple(shape))
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch types it as a function
        if func is torch.ops.aten.new_empty.default:
            return cls(args[1], args[0].dtype, (), args[0].shard)  # `dcp.async_save` copies the parts into it
        raise NotImplementedError(f"{func} of a PartedTensor: it only names values for a checkpoint")

    def __deepcopy__(self, memo: dict[int, Any]) -> "PartedTensor":
        parts = copy.deepcopy(list(self.parts.values()), memo)
        return PartedTensor(self.shape, self.dtype, parts, self.shard)

    def __reduce_ex__(self, _: Any) -> Any:
        raise CheckpointError(
            "torch.save or pickle of parallel.state_dict(): expected torch.distributed.checkpoint.save, because each "
            "rank holds only its own share; for one file, torch.save(model.state_dict(), ...) inside `with "
            "parallel.settled():`"
        )

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]  # torch leaves it untyped
        return f"PartedTensor({tuple(self.shape)}, {self.dtype}, {len(self.parts)} parts)"

    def content(self) -> Tensor | None:
        """Return what of it belongs into this rank's model, in its shape; None if this rank does not have all of it."""
        run = self.run(self.shard.offset, math.prod(self.shard.shape))
        return None if run is None else run.view(self.shard.shape)

    def run(self, start: int, numel: int) -> Tensor | None:
        """Return a run of elements, `(numel,)`; None if this rank does not have all of them."""
        if numel == 0:
            return torch.empty(0, dtype=self.dtype)
        pieces, found = [], 0
        for part in sorted(self.parts.values(), key=lambda part: part.box.start):
            low = max(start, part.box.start) - part.box.start
            high = min(start + numel, part.box.start + part.box.numel) - part.box.start
            if low < high:
                if part.value is None:
                    return None
                pieces.append(part.value[low:high])
                found += high - low
        if found < numel:
            return None
        return torch.cat(pieces) if len(pieces) != 1 else pieces[0]

    def __create_write_items__(self, name: str, _: object) -> list[Any]:
        """Return what this rank writes."""
        # Imported here because the checkpoint package takes a second, and a run without checkpoints does not need it.
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(name, part.box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=_chunk(part.box), properties=TensorProperties(dtype=self.dtype), size=self.shape
                ),
            )
            for part in self.parts.values()
            if part.is_written_here and part.value is not None
        ]

    def __create_chunk_list__(self) -> list[Any]:
        """Return what this rank reads."""
        return [_chunk(part.box) for part in self.parts.values()]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """Return the storage of one part, in the box's shape."""
        part = self.parts[tuple(index.offset)]
        if part.value is None:
            part.value = torch.empty(part.box.numel, dtype=self.dtype)
        return part.value.view(part.box.sizes)


def _chunk(box: Box) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


Fragments = Sequence[tuple[int, Tensor]]
"""Runs of one parameter's elements that this rank holds: first element, and values `(numel,)`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """A run of one parameter's elements that one rank writes."""

    rank: int
    start: int
    stop: int


class Shares:
    """The shares of all ranks: the runs that each rank owns, or would own if the optimizer were sharded.

    A parameter's boxes follow from the shares alone, so every rank cuts it in the same way.
    """

    def __init__(self, layout: Layout, rank: int) -> None:
        self.rank = rank
        self._of_slot = [list(_shares_of(layout, slot)) for slot in layout.slots]

    def cut(
        self, slot: Slot, dtype: torch.dtype, fragments: Fragments = (), *, everywhere: bool
    ) -> PartedTensor:
        """Return a tensor in parts that has the shape of a parameter.

        Args:
            slot: The parameter.
            dtype: Dtype of the values.
            fragments: The values that this rank has, of the slot.
            everywhere: Whether to include the shares of all ranks, or only that of this rank.
        """
        parts = [
            Part(
                box,
                _find(fragments, slot.offset, box) if box.numel else torch.empty(0, dtype=dtype),
                share.rank == self.rank,
            )
            for share in self._of_slot[slot.index]
            if everywhere or share.rank == self.rank
            for box in _boxes(slot, share)
        ]
        return PartedTensor(slot.whole_shape, dtype, parts, slot.shard)

    def uncut(self, value: Tensor, *, blank: bool, alike: bool) -> PartedTensor:
        """Return a tensor in a single part, or in those that hold this rank's shard of it.

        Args:
            value: Gives the shape, the dtype and, unless `blank`, the values.
            blank: Leave the values out.
            alike: Whether all ranks hold the same values, so that any rank may write them; otherwise rank 0 does.
        """
        local, shard = shard_of(value)
        flat = None if blank else local.detach().reshape(-1)
        if shard is not None:
            return self.held(shard, value.dtype, flat)
        return PartedTensor(
            value.shape, value.dtype, [Part(whole(value.shape), flat, alike or self.rank == 0)]
        )

    def held(self, shard: Shard, dtype: torch.dtype, values: Tensor | None) -> PartedTensor:
        """Return a tensor of which this rank writes and reads its shard.

        Args:
            shard: Of this rank.
            dtype: Dtype of the values.
            values: Of the shard, `(numel,)`; None if there are none yet.
        """
        boxes = cover(shard.whole_shape, shard.offset, shard.offset + math.prod(shard.shape))
        fragments = [] if values is None else [(0, values)]
        parts = [Part(box, _find(fragments, shard.offset, box), True) for box in boxes]
        return PartedTensor(shard.whole_shape, dtype, parts, shard)

    def whole(self, slot: Slot, like: Tensor, value: Tensor | None) -> PartedTensor:
        """Return a number or a tensor of any shape that belongs to a parameter.

        A rank that writes the parameter's first element writes it too.

        Args:
            slot: The parameter.
            like: Gives the shape and the dtype.
            value: None if there is none yet.
        """
        is_first = self._of_slot[slot.index][0].rank == self.rank and slot.offset == 0
        flat = None if value is None else value.reshape(-1)
        return PartedTensor(like.shape, like.dtype, [Part(whole(like.shape), flat, is_first)])


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
    if math.prod(slot.whole_shape) == 0:
        yield whole(slot.whole_shape)
    yield from cover(slot.whole_shape, slot.offset + share.start, slot.offset + share.stop)


def _find(fragments: Fragments, offset: int, box: Box) -> Tensor | None:
    for first, values in fragments:
        start = offset + first
        if start <= box.start and box.start + box.numel <= start + values.numel():
            return values[box.start - start : box.start - start + box.numel]
    return None
