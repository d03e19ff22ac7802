"""The echo buffer: fresh batches that are kept for further uses, and a check that no code writes into them.

A training loop that writes into its batch, to normalise it or to mix samples, would train on other data at the next
use. PyTorch counts the in-place writes to every tensor, also those through views and `detach()`. A count that has
changed between two uses is an error. Writes through `.data` and through `numpy()` are not counted. Objects without a
count, such as a NumPy array, an inference tensor or a user's object, are copied for every use.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_with_path

from stretto.echo.state import Position
from stretto.errors import BatchChanged, ConfigError


@dataclass(kw_only=True, slots=True)
class HeldBatch:
    """A batch in the buffer. Plans read its number and its uses."""

    number: int
    """Number of fresh batches that this rank returned before it, over all epochs."""
    uses: int = 0
    """Number of uses so far."""
    update: int = -1
    """The last update that used it; counted as in `Selector.select`."""
    used_at: tuple[int, ...] = ()
    """Fingerprints of the parameters at each of its uses, if known."""
    batch: Any = None
    """The batch as the loader returned it, changed by `place`."""
    state_before: Any = None
    """State of the bare loader before the batch was fetched; None for a loader without a state."""
    writes: tuple[tuple[str, Tensor, int], ...] = ()
    """For each of its tensors: its path, the tensor, and its count of in-place writes on arrival."""

    def can_be_used(self, update: int, parameters: int | None) -> bool:
        """Return whether its gradient would be new, in `update` and at these parameters."""
        return self.update != update and parameters not in self.used_at


class EchoBuffer:
    """Keeps the last fresh batches."""

    def __init__(self) -> None:
        self.held: list[HeldBatch] = []
        """The batches, oldest first."""

    def add(self, batch: Any, size: int, **fields: Any) -> HeldBatch:
        """Add `batch`, and drop the oldest batches beyond `size`; the other arguments are fields of `HeldBatch`."""
        writes = tuple(
            (f"batch{keystr(path)}", leaf, _num_writes(leaf))
            for path, leaf in tree_flatten_with_path(batch)[0]
            if isinstance(leaf, Tensor)
        )
        held = HeldBatch(batch=batch, writes=writes, **fields)
        self.held = [*self.held, held][-size:]
        return held

    def room(self, position: Position, pool: int) -> int:
        """Return how many batches to hold, including one more.

        Args:
            position: The loader's position.
            pool: See `Plan.pool`.
        """
        size = pool - 1 + max(position.slot + 1, position.slots_before)
        if position.repeats:  # what an echoed update has used, however far back, the next one may use again
            in_use = [index for index, one in enumerate(self.held) if one.update >= position.update - 1]
            size = max(size, len(self.held) - min(in_use, default=len(self.held)) + 1)
        return size

    def clear(self) -> None:
        """Drop all batches."""
        self.held = []

    def use(self, held: HeldBatch, step: int, update: int, parameters: int | None) -> Any:
        """Count another use of `held`, and return the batch for the caller.

        Args:
            held: A batch in the buffer.
            step: Number of batches returned before, for messages.
            update: The update that uses it.
            parameters: Fingerprint of the current parameters; None if unknown.

        Raises:
            BatchChanged: A tensor of the batch was written in place since the batch arrived.
        """
        for path, tensor, before in held.writes if held.uses else ():
            if (now := _num_writes(tensor)) != before:
                raise BatchChanged(
                    f"step {step}: {path} of shape {tuple(tensor.shape)} in fresh batch {held.number} was written in "
                    f"place {now - before} times before its next use: expected an unchanged batch; write into a copy"
                )
        held.uses += 1
        held.update = update
        if parameters is not None:
            held.used_at = (*held.used_at, parameters)
        return rebuilt(held.batch, _alias)


def rebuilt(batch: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    """Return `batch` in new containers, with each tensor replaced by `replace(tensor)`.

    Containers are nodes of PyTorch's pytree: dictionaries, lists, tuples, named tuples, registered classes.
    Everything else, such as a NumPy array or a dataclass, is copied with all its contents.

    Raises:
        ConfigError: An object cannot be copied.
    """
    copies: dict[int, Any] = {}

    def renew(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return replace(leaf)
        if isinstance(leaf, MappingProxyType):
            return MappingProxyType(rebuilt(dict(leaf), copied))
        try:
            return copy.deepcopy(leaf, copies)
        except Exception as error:
            raise ConfigError(
                f"batch{keystr(path)} of type {type(leaf).__name__} cannot be copied ({error}): expected tensors, "
                "arrays, plain values, and objects that copy.deepcopy copies"
            ) from error

    return tree_map_with_path(renew, batch)


def copied(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, pinned if `tensor` is."""
    if tensor.grad_fn is not None:
        return tensor.clone()
    own = tensor.detach().clone()
    return (own.pin_memory() if tensor.is_pinned() else own).requires_grad_(tensor.requires_grad)


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor with the same memory and the same count of writes, but a separate `grad`."""
    if tensor.is_inference():
        return tensor.clone()  # its writes are not counted
    return tensor if tensor.grad_fn is not None else tensor.detach().requires_grad_(tensor.requires_grad)


def _num_writes(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
