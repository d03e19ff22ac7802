"""A relay: every rank sends its bytes to another rank, which so holds a copy of them."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from stretto.exchange.broadcast import LARGEST_BROADCAST
from stretto.exchange.exchange import in_flight
from stretto.exchange.transfer import Started, Transfer
from stretto.groups.collectives import method_of

# At most. Four are sent at a time, so all have gone after about eight looks.
_PARTS = 32


def relay(
    group: dist.ProcessGroup, content: bytes | memoryview, lengths: Sequence[int], to: Sequence[int]
) -> tuple[Iterator[Started], dict[int, memoryview]]:
    """Send bytes to another rank, and take those of all that send theirs to this one; all ranks must call.

    Args:
        group: Of tensors in the host's memory; no other code uses it meanwhile.
        content: Of this rank.
        lengths: Of every rank's bytes.
        to: The rank to which each sends its own.

    Returns:
        The started collectives, each of which the caller completes before it requests the next, and by sender the
        memory of the received bytes, which is complete after the last collective.
    """
    rank, ranks = group.rank(), range(group.size())
    all_to_all = method_of(group, "all_to_all_single")
    numel = max(LARGEST_BROADCAST, -(-max(lengths) // _PARTS))
    outgoing = memoryview(content)
    received = {
        source: torch.empty(lengths[source], dtype=torch.int8) for source in ranks if to[source] == rank
    }
    nothing = torch.empty(0, dtype=torch.int8)

    def transfer(index: int) -> Transfer:
        here = slice(index * numel, (index + 1) * numel)
        part = bytearray(outgoing[here])
        own = torch.frombuffer(part, dtype=torch.int8) if part else nothing
        places = {source: place[here] for source, place in received.items()}
        arrives = [places[source].numel() if source in places else 0 for source in ranks]
        (arriving,) = places.values() if len(places) == 1 else [torch.empty(sum(arrives), dtype=torch.int8)]
        splits = [own.numel() * (other == to[rank]) for other in ranks]
        yield all_to_all(arriving, own, arrives, splits), "copy of a rank's state"
        if len(places) > 1:
            came = arriving.split([place.numel() for place in places.values()])
            for place, part_of_one in zip(places.values(), came, strict=True):
                place.copy_(part_of_one)

    transfers = in_flight(map(transfer, range(-(-max(lengths) // numel))))
    works = (one for one in transfers if isinstance(one, tuple))
    return works, {source: place.numpy().data for source, place in received.items()}
