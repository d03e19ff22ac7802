"""Methods of PyTorch and other libraries behind the interface of `DataParallel`: what ours are compared with."""

from typing import Any

import torch
from torch import nn

from stretto.errors import ConfigError
from stretto.fields import field_types, is_count, unknown_name
from stretto.noise import Noise
from stretto_lab.peers.libraries import AccelerateLocalSGD, HivemindAverages, TorchftDiLoCo
from stretto_lab.peers.peer import Peer
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
        AccelerateLocalSGD,
        TorchftDiLoCo,
        HivemindAverages,
    )
}


def make_peer(
    name: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: int,
    *,
    clip_norm: float | None = None,
    scheduler: Any = None,
    noise: Noise | None = None,
    **options: Any,
) -> Peer:
    """Set up a stock method over all ranks of the job; all ranks must call.

    Args:
        name: One of `PEERS`.
        model: On its device, with equal weights on all ranks. Train through the peer's `model`.
        optimizer: Over all trainable parameters of the model, not yet stepped; schedulers may turn it.
        micro_batches: Per rank and update.
        clip_norm: Limit of the gradients' global norm; None does not clip.
        scheduler: Turned at every update; None leaves it to the caller.
        noise: Added to what each rank holds of the mean gradient; that of averages is left out.
        options: Of the method's `options_type`.

    Raises:
        UnknownName: There is no such method, or it has no such option.
        ConfigError: `micro_batches` is below 1, an option cannot be, or the method needs a job of `torch.distributed`
            and there is none.
        MissingExtra: The library of the method is not installed.
    """
    if name not in PEERS:
        raise unknown_name("no stock method is called", name, PEERS)
    if not is_count(micro_batches, 1):
        raise ConfigError(
            f"{name} needs a fixed number of micro-batches per update of at least 1, found {micro_batches}"
        )
    kind = PEERS[name]
    if unknown := sorted(options.keys() - field_types(kind.options_type)):
        raise unknown_name(f"{name} has no option", unknown[0], field_types(kind.options_type))
    return kind(
        model,
        optimizer,
        micro_batches,
        clip_norm=clip_norm,
        scheduler=scheduler,
        noise=noise,
        options=kind.options_type(**options),
    )


__all__ = ["PEERS", "Peer", "make_peer"]
