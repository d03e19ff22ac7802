"""Repeats: rows that did not arrive as they were sent travel again, until all ranks have all of theirs.

Each phase of a verified exchange ends with a small gather: how many rows does each rank miss? If none are missing, the
phase is over. Otherwise every rank learns who misses what, and all enter one all-to-all that carries only those rows
and is empty for most ranks. After `REPEATS` of them, every rank raises the same error.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from stretto.errors import TransferCorrupt
from stretto.exchange.exchange import Exchange

REPEATS = 3
"""How often a damaged row is sent again; four failures in a row are no accident."""
_ENTRY = np.dtype([("index", "<u4"), ("sender", "<u4")])


@dataclasses.dataclass(frozen=True, slots=True)
class Missing:
    """A row that did not arrive as it was sent."""

    receiver: int
    sender: int
    index: int
    """Of the transfer within its phase."""

    def __str__(self) -> str:
        return f"bucket {self.index} from rank {self.sender} to rank {self.receiver}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Delivery:
    """How the rows of one phase are made again, and how they are received."""

    site: str
    """For messages and records."""
    row_bytes: Sequence[int]
    """Bytes of a row, by transfer."""
    row: Callable[[int, int], Tensor]
    """Returns this rank's sealed row of a transfer for a receiver."""
    accept: Callable[[dict[Missing, Tensor]], Sequence[Missing]]
    """Takes rows that have arrived, sound or not, and returns those that are still missing."""


def complete(exchange: Exchange, missing: Sequence[Missing], delivery: Delivery) -> None:
    """Send again what some rank misses, until nobody does; all ranks must call.

    Args:
        exchange: Connects the ranks.
        missing: The rows that this rank misses.
        delivery: Makes and receives the rows of the phase.

    Raises:
        TransferCorrupt: On every rank, naming senders and receivers.
    """
    for repeats in itertools.count():
        wanted = _of_all_ranks(exchange, missing)
        if not wanted:
            return
        if repeats == REPEATS:
            raise TransferCorrupt(
                f"rank {exchange.rank}: {delivery.site} still damaged after {REPEATS} repeats: expected what the "
                f"sender had sealed, found something else in {'; '.join(map(str, wanted))}; take that rank or that "
                "link out of the job",
                links=sorted({(lost.sender, lost.receiver) for lost in wanted}),
            )
        missing = delivery.accept(_send_again(exchange, wanted, delivery))


def _of_all_ranks(exchange: Exchange, missing: Sequence[Missing]) -> list[Missing]:
    """Return what all ranks miss: the same list on every rank, in the order of receivers."""
    counts = [int.from_bytes(record) for record in exchange.gather_bytes(len(missing).to_bytes(4))]
    if not any(counts):
        return []
    own = np.zeros(max(counts), _ENTRY)
    for position, entry in enumerate(missing):
        own[position] = entry.index, entry.sender
    tables = [np.frombuffer(record, _ENTRY) for record in exchange.gather_bytes(own.tobytes())]
    return [
        Missing(receiver, int(entry["sender"]), int(entry["index"]))
        for receiver, (table, count) in enumerate(zip(tables, counts, strict=True))
        for entry in table[:count]
    ]


def _send_again(exchange: Exchange, wanted: Sequence[Missing], delivery: Delivery) -> dict[Missing, Tensor]:
    """Exchange the wanted rows among all ranks, and return those that this rank wanted."""
    ranks = range(exchange.world_size)
    to_send = [[w for w in wanted if (w.sender, w.receiver) == (exchange.rank, rank)] for rank in ranks]
    to_take = [[w for w in wanted if (w.sender, w.receiver) == (rank, exchange.rank)] for rank in ranks]
    device = exchange.layout.sets[0].device
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    rows = [delivery.row(w.index, w.receiver) for to_one in to_send for w in to_one]
    outgoing = torch.cat([nothing, *rows])
    sent, taken = (
        [sum(delivery.row_bytes[w.index] for w in of_one) for of_one in of_all]
        for of_all in (to_send, to_take)
    )
    received = torch.empty(sum(taken), dtype=torch.uint8, device=device)
    exchange.sent_bytes += sum(sent) - sent[exchange.rank]
    exchange.wait(exchange.group.alltoall_base(received, outgoing, taken, sent), f"repeat of {delivery.site}")
    arrived = [w for of_one in to_take for w in of_one]
    parts = torch.split(received, [delivery.row_bytes[w.index] for w in arrived])
    return dict(zip(arrived, parts, strict=True))
