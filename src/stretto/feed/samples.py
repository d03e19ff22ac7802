"""How many samples a batch has, whatever it is."""

import dataclasses
from collections.abc import Iterator, Mapping

from torch import Tensor


def num_samples(batch: object) -> int:
    """Return the length of the first tensor or array found in a batch, or 1: a record, for which no job may end."""
    try:
        return next(_lengths(batch), 1)
    except Exception:  # a batch may be any object, with any attributes
        return 1


def _lengths(batch: object) -> Iterator[int]:
    """Yield the length of every tensor and array in the containers of a batch; 1 for one without dimensions."""
    if isinstance(batch, Tensor):
        yield int(batch.size(0)) if batch.dim() else 1  # a nested one has no shape
    elif isinstance(batch, Mapping):  # before it is asked for attributes, which may be its keys
        yield from _lengths(list(batch.values()))
    elif isinstance(batch, (list, tuple)):
        for part in batch:
            yield from _lengths(part)
    elif isinstance(shape := getattr(batch, "shape", None), tuple):
        if not shape or isinstance(shape[0], int):
            yield shape[0] if shape else 1
    elif dataclasses.is_dataclass(batch):
        yield from _lengths([getattr(batch, field.name) for field in dataclasses.fields(batch)])
