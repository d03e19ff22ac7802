"""PyTorch's own methods with the interface of `DataParallel`, to compare Stretto with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stretto.errors import ConfigError
from stretto.fields import field_types, is_count, unknown_name
from stretto_lab.peers.peer import NoOptions, Peer
from stretto_lab.peers.stock import (
    Compute,
    TorchDDP,
    TorchDDPbf16,
    TorchDDPPowerSGD,
    TorchDDPZero,
    TorchFSDP2,
    TorchLocalSGD,
)

PEERS: dict[str, type[Peer]] = {
    kind.name: kind
    for kind in (
        Compute,
        TorchDDP,
        TorchDDPbf16,
        TorchDDPPowerSGD,
        TorchDDPZero,
        TorchLocalSGD,
        TorchFSDP2,
    )
}


def make_peer(
    kind: str | Callable[..., Peer],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: int,
    *,
    clip_norm: float | None = None,
    scheduler: Any = None,
    **options: Any,
) -> Peer:
    """Set up a stock method over all ranks of the job; all ranks must call it.

    Args:
        kind: The name of one of `PEERS`, or a callable that makes a peer and has an `options_type`.
        model: On its device, with equal weights on all ranks. Train through the peer's `model`.
        optimizer: Over all trainable parameters of the model, not yet stepped; schedulers may set its rates.
        micro_batches: Per rank and update.
        clip_norm: Limit of the gradients' global norm; None does not clip.
        scheduler: Stepped at every update; None if the caller steps one.
        options: Fields of the method's `options_type`.

    Raises:
        UnknownName: There is no such method, or it has no such option.
        ConfigError: `micro_batches` is below 1, an option has a value that is not allowed, or the method needs a job of
            `torch.distributed` and there is none.
    """
    if isinstance(kind, str):
        if kind not in PEERS:
            raise unknown_name("no stock method is called", kind, PEERS)
        kind = PEERS[kind]
    name = getattr(kind, "name", kind.__name__)
    if not is_count(micro_batches, 1):
        raise ConfigError(
            f"{name} needs a fixed number of micro-batches per update of at least 1, found {micro_batches}"
        )
    record = options_of(kind)
    if unknown := sorted(options.keys() - field_types(record)):
        raise unknown_name(f"{name} has no option", unknown[0], field_types(record))
    return kind(
        model,
        optimizer,
        micro_batches,
        clip_norm=clip_norm,
        scheduler=scheduler,
        options=record(**options),
    )


def options_of(kind: Callable[..., Peer]) -> type:
    """Return the class of a method's options."""
    found: type = getattr(kind, "options_type", NoOptions)
    return found


__all__ = ["PEERS", "Peer", "make_peer", "options_of"]
