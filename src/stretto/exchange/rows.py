"""Rows: what one rank sends to another of one bucket, with a seal, by which the receiver checks what has arrived."""

import struct

import torch
import xxhash
from torch import Tensor

from stretto.checksums import digest
from stretto.exchange.wire import Wire

SEAL_BYTES = 8
"""A 64-bit digest; keeps the rows behind it aligned for any dtype."""


def seed_of(*what: int) -> int:
    """Return a seed that identifies a row, so that the right bytes in the wrong place do not match their seal."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(what)}Q", *what))


def seal(row: Tensor, values: Tensor, wire: Wire, seed: int) -> Tensor:
    """Write `values` and their seal into `row`, and return it.

    Args:
        row: `(wire.num_bytes(values.numel()) + SEAL_BYTES,)` uint8; overwritten.
        values: The values to send.
        wire: The format in which they travel.
        seed: Identifies the row, from `seed_of`.
    """
    content = row[:-SEAL_BYTES]
    wire.write(values, content)
    mark = bytearray(digest(content, seed).to_bytes(SEAL_BYTES, "little"))
    row[-SEAL_BYTES:].copy_(torch.frombuffer(mark, dtype=torch.uint8))
    return row


def opened(row: Tensor, seed: int) -> tuple[int, int]:
    """Return the digest that a row's seal holds, and the one that its values have."""
    expected = int.from_bytes(row[-SEAL_BYTES:].cpu().numpy().tobytes(), "little")
    return expected, digest(row[:-SEAL_BYTES], seed)


def values_of(row: Tensor, wire: Wire) -> Tensor:
    """Return a row's values; a view where the format is plain."""
    return wire.read(row[:-SEAL_BYTES])


def seal_bytes(record: bytes, seed: int) -> bytes:
    """Return a record with its seal behind it."""
    return record + xxhash.xxh3_64_intdigest(record, seed=seed).to_bytes(SEAL_BYTES, "little")
