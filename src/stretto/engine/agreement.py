"""What ranks settle among themselves before the first round: equal settings, equal starting values."""

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import distributed as dist
from torch import nn

from stretto.errors import RanksDisagree
from stretto.exchange import Exchange
from stretto.flat import GradientBuffer


def agree(exchange: Exchange, settings: Mapping[str, object]) -> None:
    """Raise on every rank unless all ranks hold the same settings.

    Args:
        exchange: Whose ranks.
        settings: What must be equal, by name; compared by `repr`.

    Raises:
        RanksDisagree: Names the settings that differ and the ranks that differ from rank 0.
    """
    own = b"".join(hashlib.sha256(repr(value).encode()).digest() for value in settings.values())
    records = exchange.gather_bytes(own)
    if all(record == records[0] for record in records):
        return
    size = hashlib.sha256().digest_size
    differing = {
        name: [r for r, record in enumerate(records) if _part(record, i, size) != _part(records[0], i, size)]
        for i, name in enumerate(settings)
    }
    found = "; ".join(
        f"{name} of ranks {ranks} (here: {str(settings[name])[:200]})"
        for name, ranks in differing.items()
        if ranks
    )
    raise RanksDisagree(f"rank {exchange.rank}, before step 1: these differ from rank 0's: {found}")


def share_start(
    exchange: Exchange, parameters: Sequence[nn.Parameter], buffer: GradientBuffer, model: nn.Module
) -> None:
    """Give every rank the parameters and buffers of rank 0, to the bit.

    Args:
        exchange: Whose ranks.
        parameters: In the layout's order; overwritten on ranks other than 0.
        buffer: Scratch; left undefined.
        model: Whose buffers, of any dtype, are overwritten too.
    """
    options = dist.BroadcastOptions()
    options.rootRank = 0
    with torch.no_grad():
        torch._foreach_copy_(buffer.views, list(parameters))
        for tensor in [*buffer.flats, *(b.detach() for b in model.buffers())]:
            contiguous = tensor.contiguous()
            exchange.wait(exchange.group.broadcast([contiguous], options), "broadcast of rank 0's parameters")
            if contiguous is not tensor:
                tensor.copy_(contiguous)
        torch._foreach_copy_(list(parameters), buffer.views)


def _part(record: bytes, index: int, size: int) -> bytes:
    return record[index * size : (index + 1) * size]
