"""PyTorch's own methods with the interface of `DataParallel`, to compare Stretto with."""

from collections.abc import Callable

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


def options_of(kind: Callable[..., Peer]) -> type:
    """Return the class of a method's options."""
    found: type = getattr(kind, "options_type", NoOptions)
    return found


__all__ = ["PEERS", "Peer", "options_of"]
