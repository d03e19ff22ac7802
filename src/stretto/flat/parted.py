"""A tensor that is spread over ranks, as `torch.distributed.checkpoint` writes and reads it."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.flat.boxes import Box


@dataclasses.dataclass(slots=True)
class Part:
    """One box of a tensor."""

    box: Box
    value: Tensor | None
    """`(box.numel,)`; None where nothing exists yet: never written, allocated when read."""
    is_written_here: bool
    """Of several ranks that would write the same part, the planner chooses one."""


class PartedTensor(Tensor):
    """The shape and dtype of a whole tensor, and those parts of it that concern this rank.

    No storage of its own and no arithmetic. `dcp.save` writes the parts that are this rank's to write,
    `dcp.load` reads into all of them; the three methods with double underscores are its protocol for that.
    Every part is the same box in both directions, whoever holds it.
    """

    parts: dict[tuple[int, ...], Part]
    """By offsets."""

    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, parts: Iterable[Part]) -> "PartedTensor":
        """Make the tensor; parts must be disjoint."""
        self: PartedTensor = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)
        self.parts = {part.box.offsets: part for part in parts}
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch types it as a function
        raise NotImplementedError(f"{func} of a PartedTensor: it only names values for a checkpoint")

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]  # torch leaves it untyped
        return f"PartedTensor({tuple(self.shape)}, {self.dtype}, {len(self.parts)} parts)"

    def content(self, start: int = 0, numel: int | None = None) -> Tensor | None:
        """Return a run of elements, `(numel,)`, or None where this rank does not have all of them."""
        numel = self.shape.numel() if numel is None else numel
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
        # Imported here: the checkpoint package costs a second, and a run without checkpoints never needs it.
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
