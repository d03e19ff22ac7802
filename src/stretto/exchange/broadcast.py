"""Broadcasts from one rank to all: at the start of a job, and to replace a damaged copy."""

import torch
from torch import Tensor
from torch import distributed as dist

from stretto.exchange.exchange import Exchange, in_flight
from stretto.exchange.transfer import Transfer

LARGEST_BROADCAST = 2**20
"""Bytes of a tensor that one broadcast sends: few enough that each completes in time on a slow link."""


def broadcast(exchange: Exchange, tensor: Tensor, source: int, what: str) -> None:
    """Overwrite `tensor`, of any dtype, shape and strides, with rank `source`'s values; all ranks must call it.

    Args:
        exchange: The exchange of the ranks.
        tensor: A tensor on any device, of the same size on all ranks.
        source: The rank that sends.
        what: Name of the wait, for messages.
    """
    if tensor.numel() == 0:
        return
    options = dist.BroadcastOptions()
    options.rootRank = source
    # As bytes: backends do not know every dtype.
    content = tensor.detach().contiguous().view(-1).view(torch.uint8).to(exchange.layout.sets[0].device)
    if exchange.rank == source:
        exchange.count_sent((exchange.world_size - 1) * content.numel())

    def transfer(part: Tensor) -> Transfer:
        yield exchange.group.broadcast([part], options), what

    exchange.run(in_flight(map(transfer, content.split(LARGEST_BROADCAST))))
    if content.data_ptr() != tensor.data_ptr():
        with torch.no_grad():
            tensor.copy_(content.to(tensor.device).view(tensor.dtype).view(tensor.shape))
