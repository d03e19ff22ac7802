"""Sealed rows: values on their way, and behind them a digest of what they are and whose."""

import struct

import torch
import xxhash
from torch import Tensor

from stretto.digests import digest

SEAL_BYTES = 8
"""A 64-bit digest; keeps the rows behind it aligned for any dtype."""


def seed_of(*what: int) -> int:
    """Return a number for what a row is, so that the right bytes in the wrong place do not fit their seal."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(what)}Q", *what))


def seal(row: Tensor, values: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """Write `values` in `dtype` and their seal into `row`, and return it.

    Args:
        row: `(values.numel() * itemsize + SEAL_BYTES,)` uint8; overwritten.
        values: What is sent.
        dtype: In which it travels.
        seed: What it is.
    """
    content = row[:-SEAL_BYTES]
    content.view(dtype).copy_(values)
    mark = bytearray(digest(content, seed).to_bytes(SEAL_BYTES, "little"))
    row[-SEAL_BYTES:].copy_(torch.frombuffer(mark, dtype=torch.uint8))
    return row


def opened(row: Tensor, seed: int) -> tuple[int, int]:
    """Return the digest that a row's seal holds, and the one that its values have."""
    expected = int.from_bytes(row[-SEAL_BYTES:].cpu().numpy().tobytes(), "little")
    return expected, digest(row[:-SEAL_BYTES], seed)


def values_of(row: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a view of a row's values."""
    return row[:-SEAL_BYTES].view(dtype)


def seal_bytes(record: bytes, seed: int) -> bytes:
    """Return a record with its seal behind it."""
    return record + xxhash.xxh3_64_intdigest(record, seed=seed).to_bytes(SEAL_BYTES, "little")
