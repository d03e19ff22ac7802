"""Rounds as bytes, to be run again on another rank: batches, random states and buffers."""

import dataclasses
from typing import Any

from torch import Tensor
from torch.serialization import default_restore_location
from torch.utils._pytree import tree_map_only

from stretto.errors import UnsafeValue, UsageError
from stretto.guards.replay import KeptRound, MicroBatch
from stretto.packed import pack, unpack


def to_bytes(kept: KeptRound) -> bytes:
    """Return a round for another rank.

    Raises:
        UsageError: A batch contains an object that only pickle could read.
    """
    # A view would be saved with its whole storage: one batch with the whole dataset.
    batches = [
        (tree_map_only(Tensor, _compact, m.batch), m.weight, m.samples, m.fresh_samples, m.random)
        for m in kept.micro_batches
    ]
    try:
        return pack((batches, kept.first_buffers), "the batch")
    except UnsafeValue as error:
        raise UsageError(f"another rank must repeat a micro-batch, which cannot be sent: {error}") from error


def from_bytes(content: bytes, own: KeptRound) -> KeptRound:
    """Return another rank's round, to be run with the model and loss function of this rank's `own`."""

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else default_restore_location(storage, str(own.device))

    batches, buffers = unpack(content, "another rank's micro-batches", place)
    names = [field.name for field in dataclasses.fields(MicroBatch)]
    return own.of([MicroBatch(**dict(zip(names, batch, strict=True))) for batch in batches], buffers)


def _compact(tensor: Tensor) -> Tensor:
    """Return a tensor whose storage holds only its own elements."""
    return tensor.detach().clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
