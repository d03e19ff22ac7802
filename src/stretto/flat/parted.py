"""The parts of a state's tensor that a rank holds, writes and reads, as runs of its elements.

PyTorch's own `torch.distributed.checkpoint` knows N-dimensional boxes alone, so a `PartedTensor` covers runs by a few.
"""

import copy
import dataclasses
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.errors import CheckpointError
from stretto.flat.layout import Layout, Slot
from stretto.flat.shards import Shard, shard_of

Range = tuple[int, int]
"""First element, and one past the last, in row-major order."""
Fragments = Sequence[tuple[int, Tensor]]
"""Runs of elements that this rank holds, disjoint and in order: first element, and values `(numel,)`."""


@dataclasses.dataclass(slots=True)
class Runs:
    """Runs of a tensor's elements."""

    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: torch.dtype
    values: list[tuple[int, Tensor]] = dataclasses.field(default_factory=list)
    """Runs that this rank holds; see `Fragments`."""
    written: list[Range] = dataclasses.field(default_factory=list)
    """Ranges that this rank writes; other ranks may hold them too."""
    wanted: list[Range] = dataclasses.field(default_factory=list)
    """Ranges that this rank reads."""

    @property
    def own(self) -> "Runs":
        """Return the runs that this rank writes."""
        values = [(start, run) for start, stop in self.written if (run := self.run(start, stop)) is not None]
        return Runs(self.shape, self.dtype, values, self.written)

    def fill(self, values: list[tuple[int, Tensor]]) -> bool:
        """Copy the wanted elements from runs in order; return whether all were found."""
        given = Runs(self.shape, self.dtype, values)
        found = [(start, run) for start, stop in self.wanted if (run := given.run(start, stop)) is not None]
        if len(found) == len(self.wanted):
            self.values = found
        return len(found) == len(self.wanted)

    def run(self, start: int, stop: int) -> Tensor | None:
        """Return elements, `(stop - start,)`, a view where they are in one run; None if some are missing."""
        pieces, place = [], start
        first = max(0, bisect_right(self.values, start, key=lambda pair: pair[0]) - 1)
        for begin, run in self.values[first:]:
            if place >= stop or begin > place:
                break
            if place < begin + run.numel():
                pieces.append(run[place - begin : stop - begin])
                place += pieces[-1].numel()
        if place < stop:
            return None
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=self.dtype)


class PartedTensor(Tensor):
    """The shape and dtype of a whole tensor, and the runs of it that this rank holds, writes or reads.

    It has no storage and no arithmetic. `torch.distributed.checkpoint` saves this rank's part, and loads into it,
    with the last three methods with double underscores.
    """

    runs: Runs
    shard: Shard
    """The part of it in this rank's model: all of it, unless ranks of a node share the tensor."""

    def __new__(cls, runs: Runs, shard: Shard | None = None) -> "PartedTensor":
        self: PartedTensor = torch.Tensor._make_wrapper_subclass(cls, runs.shape, dtype=runs.dtype)
        self.runs = runs
        self.shard = shard or Shard(runs.shape, 0, runs.shape)
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch types it as a function
        if func is torch.ops.aten.new_empty.default:  # `dcp.async_save` copies into it
            return cls(Runs(tuple(args[1]), args[0].dtype), args[0].shard)
        raise NotImplementedError(f"{func} of a PartedTensor: it only names values for a checkpoint")

    def __deepcopy__(self, memo: dict[int, Any]) -> "PartedTensor":
        return PartedTensor(copy.deepcopy(self.runs, memo), self.shard)

    def __reduce_ex__(self, _: Any) -> Any:
        raise CheckpointError(
            "torch.save or pickle of parallel.state_dict(): expected torch.distributed.checkpoint.save, because each "
            "rank holds only its own share; for one file, torch.save(model.state_dict(), ...) inside `with "
            "parallel.settled():`"
        )

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]  # torch leaves it untyped
        return f"PartedTensor({tuple(self.shape)}, {self.dtype}, {len(self.runs.values)} runs)"

    def content(self) -> Tensor | None:
        """Return the part of it in this rank's model, in its shape; None if this rank does not have all of that
        part.
        """
        run = self.run(self.shard.offset, math.prod(self.shard.shape))
        return None if run is None else run.view(self.shard.shape)

    def run(self, start: int, numel: int) -> Tensor | None:
        """Return a run of elements, `(numel,)`; None if this rank does not have all of them."""
        return self.runs.run(start, start + numel)

    def boxes(self) -> dict[tuple[int, ...], tuple["Box", bool]]:
        """Return the boxes that this rank holds or reads, by their offsets, and whether it writes each."""
        held = [(start, start + run.numel()) for start, run in self.runs.values] or self.runs.wanted
        cuts = sorted({place for run in (*held, *self.runs.written) for place in run})
        found = {}
        for start, stop in held:
            inside = [start, *(cut for cut in cuts if start < cut < stop), stop]
            for first, last in itertools.pairwise(inside):
                is_written = any(low <= first and last <= high for low, high in self.runs.written)
                found.update({box.offsets: (box, is_written) for box in cover(self.shape, first, last)})
        return found

    def __create_write_items__(self, name: str, _: object) -> list[Any]:
        """Return the boxes that this rank writes."""
        # Imported here because the checkpoint package takes a second, and most jobs do not need it.
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=_chunk(box), properties=properties, size=self.shape),
            )
            for box, is_written in self.boxes().values()
            if is_written
        ]

    def __create_chunk_list__(self) -> list[Any]:
        """Return the boxes that this rank reads."""
        return [_chunk(box) for box, _ in self.boxes().values()]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """Return the storage of one box, in its shape."""
        for start, stop in self.runs.wanted if not self.runs.values else ():
            self.runs.values.append((start, torch.empty(stop - start, dtype=self.dtype)))
        box, _ = self.boxes()[tuple(index.offset)]
        found = self.run(box.start, math.prod(box.sizes))
        if found is None:
            raise CheckpointError(f"no values from {box.offsets} on: expected the boxes of {self!r}")
        return found.view(box.sizes)


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """A block of a tensor that is contiguous in row-major order."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    """First element in the flattened tensor."""


def cover(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield, in order, at most `2 * len(shape) - 1` disjoint boxes that hold the elements `start` to `stop`.

    A run begins in the middle of a row, continues over whole rows, and ends in the middle of a row. The part in one row
    is a run of a tensor with one dimension less. A tensor without elements is one box.
    """
    row = math.prod(shape[1:])
    if not shape or not math.prod(shape):
        yield Box((0,) * len(shape), tuple(shape), 0)
        return
    first, last = -(-start // row), stop // row
    if first > last:
        yield from _within(shape, last, start, stop)
        return
    yield from _within(shape, first - 1, start, first * row)
    if first < last:
        rest = (0,) * (len(shape) - 1)
        yield Box((first, *rest), (last - first, *shape[1:]), first * row)
    yield from _within(shape, last, last * row, stop)


def _within(shape: Sequence[int], index: int, start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of a run within row `index`."""
    base = index * math.prod(shape[1:])
    for box in cover(shape[1:], start - base, stop - base) if start < stop else ():
        yield Box((index, *box.offsets), (1, *box.sizes), box.start + base)


def _chunk(box: Box) -> Any:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


class Shares:
    """The runs that each rank writes: those it owns, or would own if the optimizer were sharded.

    Args:
        layout: The job's layout.
        rank: This rank among the owners in the layout: the ranks of the node, if nodes hold shards.
        everyone: This rank among all ranks of the job, and their number; they divide the values that all of them hold.
    """

    def __init__(self, layout: Layout, rank: int, everyone: tuple[int, int]) -> None:
        self._owners, self._everyone = (rank, layout.world_size), everyone
        self._owned: dict[int, list[Range]] = {}
        for bucket in sorted(layout.buckets, key=lambda bucket: bucket.start):
            self._owned.setdefault(bucket.set_index, []).append(bucket.owned_range(*self._owners))

    def cut(
        self, slot: Slot, dtype: torch.dtype, fragments: Fragments | None, *, everywhere: bool
    ) -> PartedTensor:
        """Return a tensor in runs that has the shape of a parameter.

        Args:
            slot: The parameter.
            dtype: Dtype of the values.
            fragments: The values that this rank has, of the slot; None for a blank one.
            everywhere: Whether a blank tensor wants all of the slot, or only this rank's own part.
        """
        owned = [(slot.offset + start, slot.offset + stop) for start, stop in self._owns(slot)]
        if fragments is None:
            all_of_it = [(slot.offset, slot.offset + slot.numel)]
            runs = Runs(slot.whole_shape, dtype, wanted=all_of_it if everywhere else owned)
        else:
            held = [(slot.offset + start, fragment) for start, fragment in fragments]
            held.sort(key=lambda pair: pair[0])
            runs = Runs(slot.whole_shape, dtype, held, owned)
        return PartedTensor(runs, slot.shard)

    def uncut(self, value: Tensor, *, blank: bool, alike: bool) -> PartedTensor:
        """Return a tensor that this rank holds completely, or as a shard.

        Args:
            value: Gives the shape, the dtype and, unless `blank`, the values.
            blank: Leave the values out.
            alike: Whether all ranks hold the same values, so that each writes a part; otherwise rank 0 writes it.
        """
        local, shard = shard_of(value)
        (rank, ranks), start = (self._everyone, 0) if shard is None else (self._owners, shard.offset)
        stop = start + local.numel()
        each = -(-local.numel() // ranks) if alike else local.numel()
        own = (min(stop, start + rank * each), min(stop, start + (rank + 1) * each))
        written = [own] if own[0] < own[1] or not rank else []
        return _one_run(value, start, None if blank else local, written, shard)

    def held(self, shard: Shard, dtype: torch.dtype, values: Tensor | None) -> PartedTensor:
        """Return a tensor whose shard this rank writes and reads; values of None give a blank tensor."""
        run = (shard.offset, shard.offset + math.prod(shard.shape))
        held = [] if values is None else [(shard.offset, values)]
        return PartedTensor(Runs(shard.whole_shape, dtype, held, [run], [run]), shard)

    def whole(self, slot: Slot, like: Tensor, value: Tensor | None) -> PartedTensor:
        """Return a number or a tensor of any shape that belongs to a parameter; value None gives a blank one.

        A rank that writes the parameter's first element writes it too.
        """
        is_first = slot.offset == 0 and any(start == 0 for start, _ in self._owns(slot))
        return _one_run(like, 0, value, [(0, like.numel())] if is_first else [], None)

    def _owns(self, slot: Slot) -> Iterator[Range]:
        """Yield the elements of a slot that this rank owns; rank 0 gets a slot without owned elements."""
        if not slot.numel and not self._owners[0]:
            yield 0, 0
        owned = self._owned.get(slot.set_index, [])
        for start, stop in owned[bisect_right(owned, slot.start, key=lambda run: run[1]) :]:
            if start >= slot.stop:
                break
            if max(start, slot.start) < min(stop, slot.stop):
                yield max(start, slot.start) - slot.start, min(stop, slot.stop) - slot.start


def _one_run(
    like: Tensor, start: int, value: Tensor | None, written: list[Range], shard: Shard | None
) -> PartedTensor:
    """Return a tensor with one run that this rank holds or wants."""
    numel = like.numel() if shard is None else math.prod(shard.shape)
    held = [] if value is None else [(start, value.detach().reshape(-1))]
    return PartedTensor(Runs(tuple(like.shape), like.dtype, held, written, [(start, start + numel)]), shard)
