"""Rows: what one rank sends to another of one bucket, with a seal, by which the receiver checks what has arrived.

A row is the bytes of values and, behind them, their digest in eight more. Those of a bucket are written and looked at
together, where they lie: nothing here waits for a device.
"""

import struct
from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

from stretto.checksums import Digests, Seeds, digests_of_rows
from stretto.exchange.wire import PlainWire, Wire, read_rows, write_rows

SEAL_BYTES = 8
"""A 64-bit digest; keeps the rows behind it aligned for any dtype."""
_SENDER, _RECEIVER = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03


def seed_of(*what: int) -> int:
    """Return a seed that identifies a record, or an exchange of rows, so that another one does not fit."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(what)}Q", *what))


def seeds_to_receivers(first: int, sender: int) -> Seeds:
    """Return the seeds of a sender's rows for all receivers, where an exchange has the seed `first`."""
    return Seeds(first + sender * _SENDER, _RECEIVER)


def seeds_from_senders(first: int, receiver: int) -> Seeds:
    """Return the seeds of the rows of all senders for a receiver."""
    return Seeds(first + receiver * _RECEIVER, _SENDER)


def seal(rows: Tensor, parts: Tensor, wire: Wire, seeds: Seeds) -> None:
    """Write values and their seals.

    Args:
        rows: `(rows, wire.num_bytes(numel) + SEAL_BYTES)` uint8; overwritten.
        parts: The values to send, `(rows, ...)`, `numel` of them in each row.
        wire: The format in which they travel.
        seeds: Identify the rows.
    """
    content = rows[:, :-SEAL_BYTES]
    if isinstance(wire, PlainWire):
        content.view(wire.dtype).view(parts.shape).copy_(parts)
    else:
        packed = content.new_empty(content.shape)
        write_rows(wire, parts.reshape(len(rows), -1), packed.view(-1))
        content.copy_(packed)
    digests = digests_of_rows(content, seeds)
    if isinstance(digests, Tensor):
        rows[:, -SEAL_BYTES:].copy_(digests.view(torch.uint8).view(-1, SEAL_BYTES))
        return
    for row, one in zip(rows.numpy(), digests, strict=True):
        row.data[-SEAL_BYTES:] = one.to_bytes(SEAL_BYTES, "little")


def opened(rows: Tensor, seeds: Seeds) -> tuple[Digests, Digests]:
    """Return the digests that seals hold, and those that the values have."""
    digests = digests_of_rows(rows[:, :-SEAL_BYTES], seeds)
    if isinstance(digests, Tensor):
        # A copy: rows are written again soon.
        seals = rows[:, -SEAL_BYTES:].clone(memory_format=torch.contiguous_format)
        return seals.view(torch.int64).view(-1), digests
    return [int.from_bytes(row.data[-SEAL_BYTES:], "little") for row in rows.numpy()], digests


def values_of(rows: Tensor, wire: Wire, stream: str, round_index: int, senders: Sequence[int]) -> Tensor:
    """Return the values of rows, `(rows, numel)`, as `read_rows` does; a view where the format is plain."""
    content = rows[:, :-SEAL_BYTES]
    if isinstance(wire, PlainWire):
        return content.view(wire.dtype)
    return read_rows(wire, content.reshape(-1), stream, round_index, senders)


def seal_bytes(record: bytes, seed: int) -> bytes:
    """Return a record with its seal behind it."""
    return record + xxhash.xxh3_64_intdigest(record, seed=seed).to_bytes(SEAL_BYTES, "little")
