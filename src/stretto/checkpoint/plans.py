"""What ranks tell each other of a checkpoint, as JSON: who would write what, and where it has landed.

PyTorch's own collectives pickle these plans, and what is unpickled can run anything. A plan that is read here can at
worst name entries that do not exist.
"""

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from stretto.checkpoint.manifest import TensorKind, counts, text


def plan_as_json(plan: SavePlan) -> dict[str, Any]:
    """Return what a rank would write, and the path of every entry in the state's nested dictionaries."""
    return {"items": [_item_as_json(item) for item in plan.items], "paths": plan.planner_data}


def plan_from_json(fields: Any) -> SavePlan:
    """Return the plan that `plan_as_json` wrote.

    Raises:
        ValueError: It is something else.
    """
    paths = {text(name): tuple(path) for name, path in fields["paths"].items()}
    if not all(type(part) in (str, int) for path in paths.values() for part in path):
        raise ValueError("expected paths of text and numbers")
    return SavePlan([_item_from_json(item) for item in fields["items"]], planner_data=paths)


def _item_as_json(item: WriteItem) -> list[Any]:
    data = item.tensor_data
    if data is None:
        return [item.index.fqn, item.type.name, None, None, None]
    kind = TensorKind(tuple(data.size), data.properties.dtype)
    return [
        item.index.fqn,
        item.type.name,
        list(data.chunk.offsets),
        list(data.chunk.sizes),
        kind.as_json(),
    ]


def _item_from_json(fields: Any) -> WriteItem:
    name, type_name, offsets, sizes, kind_fields = fields
    item_type = WriteItemType[text(type_name)]
    if kind_fields is None:
        return WriteItem(MetadataIndex(text(name)), item_type)
    kind = TensorKind.from_json(kind_fields)
    chunk = ChunkStorageMetadata(torch.Size(counts(offsets)), torch.Size(counts(sizes)))
    return WriteItem(
        MetadataIndex(text(name), chunk.offsets),
        item_type,
        tensor_data=TensorWriteData(chunk, TensorProperties(dtype=kind.dtype), torch.Size(kind.shape)),
    )
