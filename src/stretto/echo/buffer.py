"""The batches in hand, unchanged however often they are used, and what is counted of them.

The tensors inside a batch: mappings, lists, tuples and named tuples, nested; anything else is left as it is.

The batches in hand: the last few fresh ones, unchanged however often they are used.

A loop that writes into its batch (mixes it up, normalises it in place) would train its second use on something else.
PyTorch counts the writes to every tensor, views and `detach()` included; a count that has moved between two uses is
an error. Writes through `.data` and NumPy are not counted, and inference tensors have no count.
"""

import copy
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from stretto.echo.plans import Held
from stretto.errors import BatchChanged


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


Copy = Literal["containers", "tensors"]


@dataclass(kw_only=True, slots=True)
class HeldBatch(Held):
    """A batch in hand, with where the loader stood."""

    batch: Any
    """As it came, placed where it is used."""
    state_before: Any
    """The loader's state before it was fetched; None for a loader without one."""
    state_after: Any
    """The loader's state after it was fetched."""
    leaves: tuple[tuple[str, Tensor], ...]
    """Its tensors, and how to reach each: found once, because containers handed out are never its own."""
    writes: tuple[int, ...]
    """Of each of its tensors, when it came."""


class Hand:
    """Holds the last `size` fresh batches.

    Args:
        size: How many.
        copy: What each use is given new.
    """

    def __init__(self, size: int, copy: Copy) -> None:
        self.held: list[HeldBatch] = []
        """Oldest first."""
        self._size = size
        self._copy = copy

    def add(self, batch: Any, number: int, state_before: Any, state_after: Any, uses: int = 0) -> HeldBatch:
        """Take a fresh batch, and let go of the oldest where there are too many."""
        leaves = tuple(tensors(batch))
        held = HeldBatch(
            number=number,
            uses=uses,
            batch=batch,
            state_before=state_before,
            state_after=state_after,
            leaves=leaves,
            writes=_writes(leaves),
        )
        self.held = [*self.held, held][-self._size :]
        return held

    def use(self, held: HeldBatch, step: int) -> Any:
        """Count a use and return what to hand out.

        Raises:
            BatchChanged: The batch was written in place since its last use.
        """
        if held.uses:
            _check(held, step)
        held.uses += 1
        return rebuilt(held.batch, Tensor.clone if self._copy == "tensors" else _same)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _writes(leaves: tuple[tuple[str, Tensor], ...]) -> tuple[int, ...]:
    return tuple([0 if tensor.is_inference() else tensor._version for _, tensor in leaves])


def _check(held: HeldBatch, step: int) -> None:
    found = _writes(held.leaves)
    if found == held.writes:
        return
    for (path, tensor), before, now in zip(held.leaves, held.writes, found, strict=True):
        if before != now:
            raise BatchChanged(
                f"step {step}: fresh batch {held.number} is to be used again, but {path} of "
                f"shape {tuple(tensor.shape)} was written in place {now - before} times since it came: expected an "
                "unchanged one; write into a copy, or let every use have its own with EchoOptions(copy='tensors')"
            )
