"""The agreement of ranks before the first round: equal settings and equal starting values."""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
from torch import Tensor, nn

from stretto.checksums import digest
from stretto.engine.accumulation import GradientBuffer
from stretto.engine.frozen_state import frozen_state
from stretto.engine.hooks import shows_estimate
from stretto.errors import RanksDisagree, TransferCorrupt
from stretto.exchange import Exchange
from stretto.exchange.broadcast import broadcast
from stretto.flat import shard_of

_SHOWN_CHARACTERS = 300
_BROADCASTS = 4
"""Most broadcasts of the starting values, if digests of the received values differ."""


def agree(
    exchange: Exchange,
    settings: Mapping[str, str],
    where: str,
    *,
    first: int = 0,
    kind: type[RanksDisagree] = RanksDisagree,
) -> None:
    """Raise on every rank unless all ranks hold the same settings.

    Args:
        exchange: The exchange of the ranks.
        settings: Texts that must be equal, by name; the names are equal on all ranks. For a text of several lines, the
            error shows the first line that differs.
        where: Rank and step, for the message.
        first: Number of the exchange's rank 0 in messages; the others follow.
        kind: Class of the error.

    Raises:
        RanksDisagree: Settings differ; the message shows the difference between the first rank and the next rank that
            differs.
    """
    own = b"".join(hashlib.sha256(text.encode()).digest() for text in settings.values())
    if len(set(exchange.gather_bytes(own))) == 1:
        return
    # All ranks know now that some differ, so all of them gather the texts.
    columns = [
        [record.decode() for record in exchange.gather_records(text.encode())] for text in settings.values()
    ]
    found = [
        f"{name}: {_difference(texts, first)}"
        for name, texts in zip(settings, columns, strict=True)
        if len(set(texts)) > 1
    ]
    raise kind(f"{where}: ranks differ in {'; in '.join(found)}; give all ranks the same")


def share_start(
    exchange: Exchange,
    parameters: Sequence[Tensor],
    buffer: GradientBuffer,
    model: nn.Module,
    everyone: Exchange,
) -> bool:
    """Copy rank 0's parameters and buffers to every rank, bit-identically.

    Args:
        exchange: The exchange of the ranks that hold the same parameters.
        parameters: In the layout's order; overwritten on ranks other than 0.
        buffer: Scratch; left undefined.
        model: Its frozen parameters and buffers, of any dtype, are overwritten too.
        everyone: The exchange of all ranks of the job.

    Returns:
        Whether rank 0's values are an estimate that an earlier job has left; the same on all ranks.
    """
    is_estimate = parameters[0].new_full((1,), float(shows_estimate(model)))
    with torch.no_grad():
        torch._foreach_copy_(buffer.views, list(parameters))
        for flat in buffer.flats:
            _take_from_rank_0(exchange, flat)
        torch._foreach_copy_(list(parameters), buffer.views)
        for _, tensor in frozen_state(model):
            local, shard = shard_of(tensor)
            _take_from_rank_0(everyone if shard is None else exchange, local)
        _take_from_rank_0(everyone, is_estimate)
    return bool(is_estimate)


def _take_from_rank_0(exchange: Exchange, tensor: Tensor) -> None:
    if not exchange.is_verified:
        broadcast(exchange, tensor, 0, "broadcast of rank 0's parameters")
        return
    # The memory of rank 0 may be damaged, so every repeat sends this copy.
    healthy = tensor.clone() if exchange.rank == 0 else tensor
    for _ in range(_BROADCASTS if tensor.numel() else 0):
        if healthy is not tensor:
            tensor.copy_(healthy)
        broadcast(exchange, tensor, 0, "broadcast of rank 0's parameters")
        if len(set(exchange.gather_bytes(digest(tensor).to_bytes(8)))) == 1:
            return
    if tensor.numel():
        raise TransferCorrupt(
            f"rank {exchange.rank}, before step 1: the starting values of rank 0 arrived damaged "
            f"{_BROADCASTS} times on some rank: expected the digest of rank 0; check the links of rank 0"
        )


def _difference(texts: Sequence[str], first: int) -> str:
    """Describe the first difference from the first rank's text; ranks are numbered from `first`."""
    differing = [rank for rank, text in enumerate(texts, start=first) if text != texts[0]]
    lines = zip_longest(texts[0].splitlines(), texts[differing[0] - first].splitlines(), fillvalue="nothing")
    expected, found = next(pair for pair in lines if pair[0] != pair[1])
    return (
        f"expected {expected[:_SHOWN_CHARACTERS]!r} as on rank {first}, found {found[:_SHOWN_CHARACTERS]!r} on rank "
        f"{differing[0]} (differing ranks: {differing})"
    )
