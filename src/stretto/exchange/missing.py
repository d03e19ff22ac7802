"""Rows and sums that ranks lack after a phase of a verified exchange, because they were damaged."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from stretto.exchange.exchange import Exchange

_ENTRY = np.dtype([("index", "<u4"), ("sender", "<u4"), ("is_sum", "?")])


@dataclasses.dataclass(frozen=True, slots=True)
class Missing:
    """A row that arrived damaged, or a wrong sum of rows."""

    receiver: int
    sender: int
    index: int
    """Index of the transfer within its phase."""
    is_sum: bool = False
    """Whether it is a sum; sender and receiver are then the same rank."""

    def __str__(self) -> str:
        if self.is_sum:
            return f"the sum of bucket {self.index} on rank {self.receiver}"
        return f"bucket {self.index} from rank {self.sender} to rank {self.receiver}"


def missing_anywhere(exchange: Exchange, missing: Sequence[Missing]) -> list[Missing]:
    """Gather the damaged rows and sums of all ranks: the same list on every rank, in the order of receivers."""
    counts = [int.from_bytes(record) for record in exchange.gather_bytes(len(missing).to_bytes(4))]
    if not any(counts):
        return []
    own = np.zeros(max(counts), _ENTRY)
    for position, entry in enumerate(missing):
        own[position] = entry.index, entry.sender, entry.is_sum
    tables = [np.frombuffer(record, _ENTRY) for record in exchange.gather_bytes(own.tobytes())]
    return [
        Missing(receiver, int(entry["sender"]), int(entry["index"]), bool(entry["is_sum"]))
        for receiver, (table, count) in enumerate(zip(tables, counts, strict=True))
        for entry in table[:count]
    ]
