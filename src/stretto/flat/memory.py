"""Checks that the elements of a model's tensors do not share memory, so that each can be written alone."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from stretto.errors import UnsupportedModel
from stretto.flat.shards import shard_of

Named = tuple[str, Tensor]


def check_memory(named: Sequence[Named]) -> None:
    """Raise if elements of a trainable parameter share memory with others, or elements of another tensor with each
    other.

    Every parameter has its own gradient, and values are copied into every tensor, so elements in one place would get
    several values. Separate parts of one storage are fine.

    Args:
        named: Parameters and buffers by name; a tensor that is registered twice is listed once.

    Raises:
        UnsupportedModel: Elements share memory; the message names the tensors.
    """
    by_storage: dict[int, list[Named]] = defaultdict(list)
    for name, held in named:
        tensor, _ = shard_of(held)
        # Sparse tensors and those that only wrap others have no storage.
        is_placed = tensor.layout is torch.strided and tensor.numel() > 0
        if is_placed and (place := tensor.untyped_storage().data_ptr()):
            by_storage[place].append((name, tensor))
    for members in by_storage.values():
        blocks = sorted((t.storage_offset() * t.itemsize, t.numel() * t.itemsize) for _, t in members)
        is_dense = all(tensor.is_contiguous() for _, tensor in members)
        trains = any(tensor.requires_grad for _, tensor in members)
        # Nearly always they are blocks that do not touch.
        are_apart = is_dense and (not trains or all(a + size <= b for (a, size), (b, _) in pairwise(blocks)))
        if not are_apart:
            _check_elements(members)


def _check_elements(members: Sequence[Named]) -> None:
    unit = min(tensor.itemsize for _, tensor in members)
    taken = torch.zeros(members[0][1].untyped_storage().nbytes() // unit, dtype=torch.int32)
    """For each `unit` bytes of the storage: zero, or the number of the tensor that uses them."""
    members = sorted(members, key=lambda member: member[1].requires_grad)
    for number, (name, tensor) in enumerate(members, start=1):
        places = _places(tensor) * (tensor.itemsize // unit)
        if len(places.unique()) < tensor.numel():
            raise UnsupportedModel(
                f"elements of {name!r} (shape {tuple(tensor.shape)}, strides {tensor.stride()}) share memory, as after "
                "expand(): expected memory for every element; use clone()"
            )
        for start in range(tensor.itemsize // unit):
            found = int(taken[places + start].max())
            if found and tensor.requires_grad:
                other = members[found - 1][0]
                raise UnsupportedModel(
                    f"{other!r} and {name!r} share memory and are not one parameter: expected separate memory "
                    "for every trainable parameter; register one nn.Parameter in both places, or clone() one"
                )
            taken[places + start] = number


def _places(tensor: Tensor) -> Tensor:
    """Return the position of each element in the storage, in elements, `(numel,)`."""
    places = torch.tensor([tensor.storage_offset()])
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = (places[:, None] + torch.arange(size) * stride).flatten()
    return places
