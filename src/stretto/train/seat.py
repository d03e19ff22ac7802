"""A rank's place in the job, and joining the others there."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from stretto.errors import CommunicationError
from stretto.groups import Link, register_throttled


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Which rank this process is, and where the ranks meet."""

    rank: int
    """From 0."""
    world_size: int
    """How many ranks there are."""
    local_rank: int
    """Position among the ranks of this machine: which of its devices this rank takes."""
    local_world_size: int
    """How many ranks share this machine."""
    host: str
    """Address of the store."""
    port: int
    """Port of the store."""
    room: str = ""
    """Prefix of everything said in the store: jobs that follow each other on one store do not meet."""


def host_store(host: str, port: int) -> TCPStore:
    """Open the store that ranks meet at; it lives as long as the returned object. Port 0 lets the system choose."""
    return TCPStore(host, port, is_master=True, wait_for_workers=False)


@contextmanager
def seated(seat: Seat, link: Link, device: torch.device, timeout_seconds: float) -> Iterator[None]:
    """Join the other ranks in torch's default group, and leave it at the end of the block.

    On a CPU the group is Gloo behind `link`; a link without limits only counts what is sent.

    Raises:
        CommunicationError: The store or a rank does not answer in time.
    """
    timeout = timedelta(seconds=timeout_seconds)
    register_throttled(link)
    try:
        store = TCPStore(seat.host, seat.port, is_master=False, timeout=timeout)
        dist.init_process_group(
            "throttled" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=PrefixStore(f"stretto/{seat.room}", store),
            rank=seat.rank,
            world_size=seat.world_size,
            timeout=timeout,
        )
    except RuntimeError as error:
        raise CommunicationError(
            f"rank {seat.rank} of {seat.world_size}: cannot join the others at {seat.host}:{seat.port} "
            f"({str(error).splitlines()[0]})"
        ) from error
    yield
    # Not after an error: the group may be broken, and the process is about to end.
    dist.destroy_process_group()


def choose_device(kind: Literal["auto", "cpu", "cuda"], seat: Seat) -> torch.device:
    """Return this rank's device; auto takes CUDA where every local rank finds a device of its own."""
    found = torch.cuda.device_count()
    if kind == "cpu" or (kind == "auto" and found < seat.local_world_size):
        return torch.device("cpu")
    device = torch.device("cuda", seat.local_rank % max(1, found))
    torch.cuda.set_device(device)
    return device
