"""The echo buffer: fresh batches that are kept for further uses, and a check that nobody writes into them.

A training loop that writes into its batch, to normalise it or to mix samples, would train on other data at the next
use. PyTorch counts the in-place writes to every tensor, also those through views and `detach()`. A count that has
changed between two uses is an error. Writes through `.data` and through NumPy are not counted, and inference tensors
have no count.
"""

import copy
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from stretto.errors import BatchChanged


@dataclass(kw_only=True, slots=True)
class HeldBatch:
    """A batch in the buffer. Plans look at its number and its uses."""

    number: int
    """Fresh batches that this rank handed out before it, over all epochs."""
    uses: int = 0
    """How often it has been handed out."""
    batch: Any = None
    """The batch itself, as the loader gave it and `place` changed it."""
    state_before: Any = None
    """State of the bare loader before the batch was fetched; None for a loader without a state."""
    writes: tuple[tuple[str, Tensor, int], ...] = ()
    """For each of its tensors: the path to it, the tensor, and its count of in-place writes when it arrived."""


class EchoBuffer:
    """Keeps the last `size` fresh batches.

    Args:
        size: Number of batches; at least 1.
        copies_tensors: Whether every use gets copies of the tensors, not only new containers.
    """

    def __init__(self, size: int, *, copies_tensors: bool) -> None:
        self.held: list[HeldBatch] = []
        """The batches, oldest first."""
        self._size = size
        self._copies_tensors = copies_tensors

    def add(self, batch: Any, number: int, state_before: Any, uses: int = 0) -> HeldBatch:
        """Keep `batch`, and drop the oldest one if there are too many; the arguments are `HeldBatch`'s fields."""
        writes = tuple((path, tensor, _num_writes(tensor)) for path, tensor in _tensors(batch))
        held = HeldBatch(number=number, uses=uses, batch=batch, state_before=state_before, writes=writes)
        self.held = [*self.held, held][-self._size :]
        return held

    def clear(self) -> None:
        """Drop all batches."""
        self.held = []

    def use(self, held: HeldBatch, step: int) -> Any:
        """Count one more use of `held`, and return what the caller gets.

        Raises:
            BatchChanged: A tensor of the batch was written in place since the batch arrived.
        """
        if held.uses:
            _check_unchanged(held, step)
        held.uses += 1
        return rebuilt(held.batch, Tensor.clone if self._copies_tensors else lambda tensor: tensor)


def rebuilt(batch: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    """Return `batch` in new containers, with `replace(tensor)` in place of each tensor.

    Containers are mappings, lists, tuples and named tuples, nested to any depth. Everything else stays as it is.
    """
    if isinstance(batch, Tensor):
        return replace(batch)
    if isinstance(batch, MutableMapping):
        fresh = copy.copy(batch)  # keeps the attributes that a subclass has beside its entries
        for key, value in batch.items():
            fresh[key] = rebuilt(value, replace)
        return fresh
    if isinstance(batch, list):
        return [rebuilt(value, replace) for value in batch]
    if isinstance(batch, tuple):
        values = [rebuilt(value, replace) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    return batch


def _tensors(batch: Any, path: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in the containers of `batch`, each with the path to it."""
    if isinstance(batch, Tensor):
        yield path, batch
    elif isinstance(batch, MutableMapping):
        for key, value in batch.items():
            yield from _tensors(value, f"{path}[{key!r}]")
    elif isinstance(batch, (list, tuple)):
        for index, value in enumerate(batch):
            yield from _tensors(value, f"{path}[{index}]")


def _num_writes(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _check_unchanged(held: HeldBatch, step: int) -> None:
    for path, tensor, before in held.writes:
        if (now := _num_writes(tensor)) != before:
            raise BatchChanged(
                f"step {step}: {path} of shape {tuple(tensor.shape)} in fresh batch {held.number} was written in place "
                f"{now - before} times before its next use: expected an unchanged batch; write into a copy, or set "
                "EchoOptions(copy='tensors')"
            )
