"""Rows: one rank's values of one bucket for another rank, with a seal, by which the receiver checks them.

A row is the bytes of values, followed by eight bytes with their digest. The rows of a bucket are written and checked
together, on their device: nothing here waits for a device.
"""

import struct
from collections.abc import Sequence

import torch
import xxhash
from torch import Tensor

from stretto.checksums import Digests, Seeds, digests_of_rows, is_on_host
from stretto.exchange.sums import Terms
from stretto.exchange.wire import PlainWire, Wire

SEAL_BYTES = 8
"""A 64-bit digest; keeps the following rows aligned for any dtype."""
_SENDER, _RECEIVER = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03


def seed_of(*what: int) -> int:
    """Return a seed that identifies a record, or an exchange of rows, so that no other record matches."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(what)}Q", *what))


def seeds_to_receivers(first: int, sender: int) -> Seeds:
    """Return the seeds of a sender's rows for all receivers; `first` is the seed of the exchange."""
    return Seeds(first + sender * _SENDER, _RECEIVER)


def seeds_from_senders(first: int, receiver: int) -> Seeds:
    """Return the seeds of the rows of all senders for a receiver."""
    return Seeds(first + receiver * _RECEIVER, _SENDER)


class Rows:
    """Rows side by side. Their views are made once, because the memory is used for many buckets.

    Args:
        memory: `(count * (bytes of values + SEAL_BYTES),)` uint8.
        kind: Number of rows, number of values in each, and their format.
    """

    def __init__(self, memory: Tensor, kind: tuple[int, int, Wire]) -> None:
        self.memory = memory
        self.kind = kind
        self.count, _, self.wire = kind
        rows = memory.view(self.count, -1)
        self.content = rows[:, :-SEAL_BYTES]
        """The values as bytes, `(count, bytes)`."""
        self.values = self.content.view(self.wire.dtype) if isinstance(self.wire, PlainWire) else self.content
        """The values as numbers, `(count, numel)`, if the format is plain."""
        self._terms = Terms(self.values) if isinstance(self.wire, PlainWire) else None
        self._seals = rows[:, -SEAL_BYTES:]
        self._on_host = is_on_host(memory)
        if self._on_host:
            array = rows.numpy()
            self._contents = [row.data[:-SEAL_BYTES] for row in array]
            self._numbers = array[:, -SEAL_BYTES:].view("<u8")[:, 0]

    def seal(self, parts: Tensor, wire: Wire, seeds: Seeds) -> None:
        """Write values and their seals.

        Args:
            parts: The values to send, `(count, ...)`, or the values of one row.
            wire: The format, with its draws.
            seeds: Seeds that identify the rows.
        """
        if isinstance(wire, PlainWire):
            (self.values if parts.dim() <= 2 else self.values.view(parts.shape)).copy_(parts)
        else:
            packed = self.content.new_empty(self.content.shape)
            wire.write(parts.reshape(-1), packed.view(-1))
            self.content.copy_(packed)
        digests = self._digests(seeds)
        if isinstance(digests, Tensor):
            self._seals.copy_(digests.view(torch.uint8).view(-1, SEAL_BYTES))
            return
        for row, one in enumerate(digests):
            self._numbers[row] = one

    def opened(self, seeds: Seeds) -> tuple[Digests, Digests]:
        """Return the digests in the seals, and the digests of the values."""
        digests = self._digests(seeds)
        if isinstance(digests, Tensor):
            # A copy: rows are written again soon.
            seals = self._seals.clone(memory_format=torch.contiguous_format)
            return seals.view(torch.int64).view(-1), digests
        return self._numbers.tolist(), digests

    def read(self, stream: str, round_index: int, senders: Sequence[int]) -> Terms:
        """Return the values in the rows, `(count, numel)`; they are views if the format is plain."""
        if self._terms:
            return self._terms
        values = self.wire.drawn(stream, round_index, *senders).read(self.content.reshape(-1))
        return Terms(values.view(self.count, -1))

    def _digests(self, seeds: Seeds) -> Digests:
        if not self._on_host:
            return digests_of_rows(self.content, seeds)
        return [xxhash.xxh3_64_intdigest(one, seeds.of(row)) for row, one in enumerate(self._contents)]


def seal_bytes(record: bytes, seed: int) -> bytes:
    """Return a record followed by its seal."""
    return record + xxhash.xxh3_64_intdigest(record, seed=seed).to_bytes(SEAL_BYTES, "little")
