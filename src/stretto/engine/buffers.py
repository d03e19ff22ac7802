"""A model's floating-point buffers side by side: copies and comparisons with a few operations for all of them.

Buffers are many and small. Results about them stay on their device, so that no code waits for them here.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

Buffer = Tensor | None
"""A buffer's value; None if there is none, or if ranks do not agree on one."""
VALUE, KIND = 1, 2
"""Bits of a report: the buffer has another value than the agreed one; it has another kind."""


def is_comparable(value: Any) -> TypeGuard[Tensor]:
    """Return whether it is a tensor whose elements can be compared, averaged and written.

    Not one that is sparse, nested, quantized, on meta or of 8 bits, nor a view that negates what it shows.
    """
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta or value.is_neg():
        return False
    is_dense = not (value.is_nested or value.is_quantized)
    return is_dense and (value.dtype.itemsize > 1 or not value.is_floating_point())


def are_alike(left: Buffer, right: Buffer) -> bool:
    """Return whether both have one kind: shape and dtype, or both missing."""
    if left is None or right is None:
        return left is right
    return left.shape == right.shape and left.dtype == right.dtype


def copies_of(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Return copies of all buffers; they may share memory with each other."""
    copies: list[Buffer] = [None] * len(buffers)
    for indices, (content,) in side_by_side(buffers):
        for index, part in zip(indices, apart(content, indices, buffers), strict=True):
            copies[index] = part
    return copies


def changed_since(agreed: Sequence[Buffer], values: Sequence[Buffer]) -> Tensor:
    """Return one byte per buffer, `(buffers,)` uint8: 0 if it equals the agreed value, otherwise `VALUE` or `KIND`.

    The result is on the device of the first buffer.
    """
    alike = [are_alike(left, right) for left, right in zip(agreed, values, strict=True)]
    compared = [value if same else None for value, same in zip(values, alike, strict=True)]
    differ = count_of(agreed, compared, of=torch.ne)
    device = next((value.device for value in (*values, *agreed) if value is not None), None)
    flags = []
    for index, same in enumerate(alike):
        if index in differ:
            flags.append(differ[index].to(device))
        else:
            flags.append(torch.full((), 0 if same else -KIND, dtype=torch.int32, device=device))
    return torch.stack(flags).clamp_(-KIND, VALUE).abs_().to(torch.uint8)


def changes_of(agreed: Sequence[Buffer], values: Sequence[Buffer]) -> bytes:
    """Return the result of `changed_since` on the host, which waits for it."""
    return bytes(changed_since(agreed, values).tolist()) if values else b""


def remain_finite(values: Sequence[Buffer], before: Sequence[Buffer], changed: Tensor) -> Tensor:
    """Return, as `()` bool, whether no changed buffer has an infinity or a NaN that its old value did not have."""
    broken = count_of(values, before, of=lambda value, old: ~value.isfinite() & old.isfinite())
    if not broken:
        return torch.ones((), dtype=torch.bool, device=changed.device)
    looked_at = changed if len(broken) == len(changed) else torch.stack([changed[index] for index in broken])
    flags = torch.stack([flag.to(changed.device) for flag in broken.values()])
    return ~(flags * looked_at).any()


def count_of(*columns: Sequence[Buffer], of: Callable[..., Tensor]) -> dict[int, Tensor]:
    """Return by index, for rows of buffers of one shape, the number of elements for which `of` is true, `()` int32."""
    found: dict[int, Tensor] = {}
    for indices, contents in side_by_side(*columns):
        until = torch.nn.functional.pad(of(*contents).cumsum(0, dtype=torch.int32), (1, 0))
        lengths = [value.numel() for index in indices if (value := columns[0][index]) is not None]
        ends = torch.tensor([0, *itertools.accumulate(lengths)])
        ends = (ends.pin_memory() if until.is_cuda else ends).to(until.device, non_blocking=True)
        found |= zip(indices, until[ends].diff().unbind(), strict=True)
    return dict(sorted(found.items()))


def side_by_side(*columns: Sequence[Buffer]) -> Iterator[tuple[list[int], list[Tensor]]]:
    """Group rows of tensors of one shape by dtypes and devices; yield each group's indices and each column's values."""
    kinds: dict[object, list[tuple[int, tuple[Tensor, ...]]]] = defaultdict(list)
    for index, row in enumerate(zip(*columns, strict=True)):
        if _have_one_shape(row):
            kinds[tuple([(value.dtype, value.device) for value in row])].append((index, row))
    for rows in kinds.values():
        indices, values = zip(*rows, strict=True)
        columns_of = zip(*values, strict=True)
        yield list(indices), [torch.cat([_in_a_row(value) for value in column]) for column in columns_of]


def _have_one_shape(row: Sequence[Buffer]) -> TypeGuard[tuple[Tensor, ...]]:
    """Return whether each tensor exists and has the shape of the first."""
    first = row[0]
    return first is not None and all([value is not None and value.shape == first.shape for value in row])


def apart(content: Tensor, indices: Sequence[int], like: Sequence[Buffer]) -> list[Tensor]:
    """Return views of `content`, in the shapes of those buffers."""
    shapes = [value.shape for index in indices if (value := like[index]) is not None]
    parts = content.split([shape.numel() for shape in shapes])
    return [part if len(shape) == 1 else part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _in_a_row(value: Tensor) -> Tensor:
    # Most have one dimension, and with many small ones the calls are what takes time.
    return value if value.ndim == 1 else value.reshape(-1)
