"""Bytes that every rank hands on to another one: copies of what it holds."""

from collections.abc import Sequence

import torch

from stretto.exchange.broadcast import LARGEST_BROADCAST
from stretto.exchange.exchange import Exchange, in_flight
from stretto.exchange.transfer import Transfer
from stretto.groups.collectives import method_of


def pass_on(
    exchange: Exchange, content: bytes | memoryview, lengths: Sequence[int], distance: int
) -> memoryview:
    """Send bytes to the rank `distance` further on, and return those of the rank as much before; all ranks must call.

    Args:
        exchange: Connects the ranks.
        content: Of this rank.
        lengths: Of every rank's bytes.
        distance: From 1 to the number of ranks less 1.
    """
    rank, world_size = exchange.rank, exchange.world_size
    to, source = (rank + distance) % world_size, (rank - distance) % world_size
    device = exchange.layout.sets[0].device
    all_to_all = method_of(exchange.group, "all_to_all_single")
    outgoing = memoryview(content)
    received = torch.empty(lengths[source], dtype=torch.int8)
    places = received.split(LARGEST_BROADCAST)
    nothing = received[:0]

    def transfer(index: int) -> Transfer:
        begin = index * LARGEST_BROADCAST
        part = bytearray(outgoing[begin : begin + LARGEST_BROADCAST])
        own = torch.frombuffer(part, dtype=torch.int8) if part else nothing
        place = places[index] if index < len(places) else nothing
        arriving = place if device.type == "cpu" else torch.empty_like(place, device=device)
        splits = [own.numel() * (other == to) for other in range(world_size)]
        arrives = [place.numel() * (other == source) for other in range(world_size)]
        yield all_to_all(arriving, own.to(device), arrives, splits), "copy of a rank's state"
        if arriving is not place:
            place.copy_(arriving)

    exchange.count_sent(len(content))
    exchange.run(in_flight(map(transfer, range(-(-max(lengths) // LARGEST_BROADCAST)))))
    return received.numpy().data
