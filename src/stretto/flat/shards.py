"""Shards: the rows of a parameter that one rank of a node holds, where FSDP2 has sharded the model inside nodes."""

import dataclasses
import math
import sys
from typing import Any, TypeGuard

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Shard:
    """A run of a parameter's elements, in row-major order: some of its rows, all or none."""

    shape: tuple[int, ...]
    """Shape of the shard."""
    offset: int
    """First element in the whole parameter."""
    whole_shape: tuple[int, ...]
    """Shape of the whole parameter."""


def is_dtensor(tensor: Tensor) -> TypeGuard[Any]:
    # Importing the module takes half a second. A program that has a DTensor has already imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def shard_of(tensor: Tensor) -> tuple[Tensor, Shard | None]:
    """Return what this rank holds of a tensor, in the tensor's own memory, and which part of it that is.

    For an ordinary tensor this is the tensor and None. A `DTensor` must be sharded by rows over a mesh of one
    dimension.
    """
    if not is_dtensor(tensor):
        return tensor, None
    with torch.no_grad():  # otherwise autograd would be between
        local: Tensor = tensor.to_local()
    rows, *rest = tensor.shape
    mesh = tensor.device_mesh
    first = min(rows, mesh.get_local_rank() * most_rows(rows, mesh.size()))
    return local, Shard(tuple(local.shape), first * math.prod(rest), tuple(tensor.shape))


def dealt_numel(tensor: Tensor) -> int:
    """Return the number of elements for which a tensor counts when whole tensors are dealt to owners; equal on all
    shards.
    """
    if not is_dtensor(tensor):
        return tensor.numel()
    rows, *rest = tensor.shape
    numel: int = most_rows(rows, tensor.device_mesh.size()) * math.prod(rest)
    return numel


def most_rows(rows: int, shards: int) -> int:
    """Return the number of rows of the first shard, as `torch.chunk` cuts; later shards may have fewer or none."""
    return -(-rows // shards)
