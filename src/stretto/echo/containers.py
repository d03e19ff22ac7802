"""The tensors inside a batch: mappings, lists, tuples and named tuples, nested; anything else is left as it is."""

import copy
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch import Tensor


def rebuilt(batch: Any, tensor: Callable[[Tensor], Tensor]) -> Any:
    """Return `batch` in fresh containers, each of its tensors replaced by `tensor(it)`."""
    if isinstance(batch, Tensor):
        return tensor(batch)
    if isinstance(batch, MutableMapping):
        # A copy keeps what a subclass carries beside its entries.
        fresh = copy.copy(batch)
        for key, value in batch.items():
            fresh[key] = rebuilt(value, tensor)
        return fresh
    if isinstance(batch, list):
        return [rebuilt(value, tensor) for value in batch]
    if isinstance(batch, tuple):
        values = [rebuilt(value, tensor) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    return batch


def tensors(batch: Any, path: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of `batch`, and how to reach it."""
    if isinstance(batch, Tensor):
        yield path, batch
    elif isinstance(batch, MutableMapping):
        for key, value in batch.items():
            yield from tensors(value, f"{path}[{key!r}]")
    elif isinstance(batch, (list, tuple)):
        for index, value in enumerate(batch):
            yield from tensors(value, f"{path}[{index}]")
