"""Bytes that every rank hands on to another one: copies of what it holds."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from stretto.exchange.broadcast import LARGEST_BROADCAST
from stretto.exchange.exchange import in_flight
from stretto.exchange.transfer import Started, Transfer
from stretto.groups.collectives import method_of

_PARTS = 32
"""At most. Four travel at a time, so all have gone after about eight looks."""


def passing_on(
    group: dist.ProcessGroup, content: bytes | memoryview, lengths: Sequence[int], distance: int
) -> tuple[Iterator[Started], memoryview]:
    """Send bytes to the rank `distance` further on, and take those of the rank as much before; all ranks must call.

    Args:
        group: Of tensors in the host's memory; nobody else uses it meanwhile.
        content: Of this rank.
        lengths: Of every rank's bytes.
        distance: From 1 to the number of ranks less 1.

    Returns:
        What it starts, each to be waited for before the next is asked for, and the place of what arrives, which is
        whole when nothing is started any more.
    """
    rank, world_size = group.rank(), group.size()
    to, source = (rank + distance) % world_size, (rank - distance) % world_size
    all_to_all = method_of(group, "all_to_all_single")
    numel = max(LARGEST_BROADCAST, -(-max(lengths) // _PARTS))
    outgoing = memoryview(content)
    received = torch.empty(lengths[source], dtype=torch.int8)
    places = received.split(numel)
    nothing = received[:0]

    def transfer(index: int) -> Transfer:
        part = bytearray(outgoing[index * numel : (index + 1) * numel])
        own = torch.frombuffer(part, dtype=torch.int8) if part else nothing
        place = places[index] if index < len(places) else nothing
        splits = [own.numel() * (other == to) for other in range(world_size)]
        arrives = [place.numel() * (other == source) for other in range(world_size)]
        yield all_to_all(place, own, arrives, splits), "copy of a rank's state"

    transfers = in_flight(map(transfer, range(-(-max(lengths) // numel))))
    return (one for one in transfers if isinstance(one, tuple)), received.numpy().data
