"""Ranks in processes: start one process per rank, join the others in a group, and name the rank that fails first."""

import dataclasses
import ipaddress
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, TypeVar

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from stretto.errors import (
    CommunicationError,
    ConfigError,
    CorruptionError,
    OutputClosed,
    PeerSilent,
    StrettoError,
    WorkerFailed,
)
from stretto.groups import Link, announce_death, register_throttled
from stretto.terminal import is_unread, print_to_nobody
from stretto_lab.patience import waiting
from stretto_lab.train.processes import Worker, supervised


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """Which rank a process is, and at which store the ranks meet."""

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
    store_prefix: str = ""
    """Of all keys in the store: jobs that follow each other on one store do not read each other's."""
    seat: int | None = None
    """Number of the process, where one that dies is replaced; None is its rank."""


def host_store(host: str, port: int) -> TCPStore:
    """Open the store at which ranks meet; it lives as long as the returned object. Port 0 lets the system choose.

    A store for ranks of this machine alone listens where no other machine reaches it. Any other listens at all
    addresses, because `host` may be a name that only the other machines know.

    Torch's store looks up the name of each client, and answers no client meanwhile: for seconds, if there is no
    resolver. It takes a loopback address from the system's table of hosts, but only where it listens for IPv4 alone.
    """
    if not _is_loopback(host):
        # Torch connects to its own store too, and would try for five minutes where `host` does not lead back here.
        return TCPStore(_LOOPBACK, port, is_master=True, wait_for_workers=False)
    listener = socket.create_server((host, port), backlog=_BACKLOG)
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


_BACKLOG = 1024
"""Connections that may wait: all ranks come at once."""
_LOOPBACK = "127.0.0.1"


def address_of(info: RankInfo) -> str | None:
    """Return where the groups of a rank listen; None where Gloo chooses, because other machines take part."""
    return _LOOPBACK if _is_loopback(info.host) else None


def _is_loopback(host: str) -> bool:
    """Return whether only processes of this machine reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


@contextmanager
def joined_group(info: RankInfo, link: Link, device: torch.device, timeout_seconds: float) -> Iterator[None]:
    """Join the other ranks in torch's default process group for the length of the block.

    On a CPU the group is Gloo behind `link`; a link without limits only counts the bytes that are sent. Where the store
    is at a loopback address, all ranks are on this machine, and Gloo listens at that address alone.

    Raises:
        CommunicationError: The store or a rank does not answer in time.
        ConfigError: The link has limits, and the devices are not processors.
    """
    if device.type != "cpu" and not link.is_free:
        raise ConfigError(
            f"--link slows Gloo, but this job is on {device}, over NCCL: remove it, or add --device cpu"
        )
    timeout = timedelta(seconds=timeout_seconds)
    register_throttled(link, address=address_of(info))
    try:
        dist.init_process_group(
            "throttled" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=store_of(info, timeout),
            rank=info.rank,
            world_size=info.world_size,
            timeout=timeout,
        )
    except RuntimeError as error:
        raise CommunicationError(
            f"rank {info.rank} of {info.world_size}: cannot join the others at {info.host}:{info.port} "
            f"({str(error).splitlines()[0]})"
        ) from error
    yield
    # Not after an error: the group may be broken, and the process is about to end.
    dist.destroy_process_group()


def store_of(info: RankInfo, timeout: timedelta) -> PrefixStore:
    """Return the store at which the ranks of a job meet, with its own prefix."""
    store = TCPStore(info.host, info.port, is_master=False, timeout=timeout)
    return PrefixStore(f"stretto/{info.store_prefix}", store)


DeviceKind = Literal["auto", "cpu", "cuda"]
CPU_WORKERS = 2
"""Local workers where no device says how many: the fewest that exchange anything."""


def local_workers(chosen: int | None, kind: DeviceKind) -> int:
    """Return how many workers to start on this machine: as many as were chosen, else one per CUDA device."""
    if chosen is not None:
        return chosen
    return (0 if kind == "cpu" else torch.cuda.device_count()) or CPU_WORKERS


def device_of(kind: DeviceKind, local_rank: int, local_world_size: int) -> torch.device:
    """Return a rank's device; auto takes CUDA where every local rank finds its own device.

    Raises:
        ConfigError: There is no CUDA device, or fewer than local ranks: NCCL wants one for each.
    """
    found = torch.cuda.device_count()
    if kind == "cpu" or (kind == "auto" and found < local_world_size):
        return torch.device("cpu")
    if found < local_world_size:
        raise ConfigError(
            f"device cuda: PyTorch finds {found} CUDA devices here, for {local_world_size} workers: expected one for "
            "each; start fewer workers, or choose device cpu"
        )
    return torch.device("cuda", local_rank)


def choose_device(kind: DeviceKind, info: RankInfo) -> torch.device:
    """Return this rank's device, made current; see `device_of`."""
    device = device_of(kind, info.local_rank, info.local_world_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def described_device(device: torch.device, kind: DeviceKind, local_world_size: int) -> str:
    """Return what a device is, for people; and where there are others, why it is none of them."""
    if device.type == "cuda":
        return f"cuda, {torch.cuda.get_device_name(device)}"
    found = torch.cuda.device_count()
    if kind == "auto" and found:
        return f"cpu: {found} CUDA device{'s' * (found > 1)} for {local_world_size} workers"
    return "cpu"


T = TypeVar("T")

TELLING_SECONDS = 1.0
"""How long to wait until the other ranks know of a dead rank: the store may be in this process, and end with it."""
GRACE_SECONDS = 5.0
"""How long the other ranks may take to notice a failure and report it; then they are killed. They look for failures
once a second, and may have to find out whom to blame, which takes two and a half (`stretto.engine.failures`)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How a rank ended that did not return."""

    text: str
    """For people."""
    is_consequence: bool = False
    """Whether another rank's failure is the cause."""
    damage: CorruptionError | None = None
    """The error, where damaged values are the cause."""
    silent: tuple[int, ...] = ()
    """Ranks that have stopped answering: their report is not awaited."""


def run_workers(function: Callable[..., T], infos: Sequence[RankInfo], *args: Any) -> list[T]:
    """Call `function(info, *args)` in one process per info and return the results in the order of infos.

    Args:
        function: Importable, like its arguments and result picklable.
        infos: The ranks to start on this machine; other machines may have more.
        args: The same for every rank.

    Raises:
        WorkerFailed: Names the rank that failed first, and the cause. All other processes have ended too.
    """
    with supervised(lands=True) as workers:
        with waiting("starting the workers"):  # they import PyTorch anew
            started = {info.rank: workers.start(work, function, info, args) for info in infos}
        workers.let_land()
        return _collect(started, infos[0])


def _collect(workers: Mapping[int, Worker], first: RankInfo) -> list[Any]:
    """Wait for every rank's report; after the first failure, for `GRACE_SECONDS` at most. `first` is one of them."""
    pending = {worker.pipe: rank for rank, worker in workers.items()}
    results: dict[int, Any] = {}
    failures: dict[int, Failure] = {}
    told: list[threading.Thread] = []
    deadline: float | None = None
    while not pending.keys() <= {workers[rank].pipe for rank in _silent(failures) & workers.keys()}:
        ready = wait(list(pending), None if deadline is None else max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in [pipe for pipe in pending if pipe in ready]:
            rank = pending.pop(pipe)
            succeeded, report = _report(workers[rank], dataclasses.replace(first, rank=rank), told)
            (results if succeeded else failures)[rank] = report
        if failures and deadline is None:
            deadline = time.monotonic() + GRACE_SECONDS
    deadline = time.monotonic() + TELLING_SECONDS
    for thread in told:
        thread.join(max(0.0, deadline - time.monotonic()))
    if failures:
        damages = [failure.damage for failure in failures.values() if failure.damage is not None]
        raise WorkerFailed(_describe(failures, len(workers), first.world_size), damages)
    return [results[rank] for rank in workers]


def _silent(failures: Mapping[int, Failure]) -> set[int]:
    return {rank for failure in failures.values() for rank in failure.silent}


def _report(worker: Worker, info: RankInfo, told: list[threading.Thread]) -> tuple[bool, Any]:
    """Return whether a rank succeeded, with its result or failure; `told` receives the process that informs the
    others of its end.
    """
    try:
        succeeded, report = worker.receive()
    except WorkerFailed as failure:
        # A store whose host is stopped does not answer, and nobody waits long for this.
        told.append(threading.Thread(target=announce, args=(info, str(failure)), daemon=True))
        told[-1].start()
        return False, Failure(text=str(failure))
    return succeeded, report


def announce(info: RankInfo, how: str) -> None:
    """Inform the other ranks that this rank has ended, and how."""
    number = info.rank if info.seat is None else info.seat
    with suppress(RuntimeError):  # the store has ended with it
        announce_death(store_of(info, timedelta(seconds=GRACE_SECONDS)), number, how)


def _describe(failures: Mapping[int, Failure], num_workers: int, world_size: int) -> str:
    """Return the message: the first failure that is not the consequence of another, then the others."""
    causes = {rank: failure for rank, failure in failures.items() if not failure.is_consequence} or failures
    rank, cause = next(iter(causes.items()))
    all_ranks = f"{world_size} local workers" if num_workers == world_size else str(world_size)
    text = f"rank {rank} of {all_ranks} failed: {cause.text}"
    for other in sorted(set(causes) - {rank}):
        if causes[other].text != cause.text:
            text += f"\nrank {other} failed too: {causes[other].text.splitlines()[-1]}"
    return text


def work(pipe: Connection, function: Callable[..., Any], info: RankInfo, args: tuple[Any, ...]) -> None:
    """Run one rank: the body of its process."""
    try:
        result = function(info, *args)
    except BaseException as error:
        if isinstance(error, OSError) and is_unread():
            print_to_nobody()
            error = OutputClosed()
        failure = Failure(
            text=_text(error),
            is_consequence=isinstance(error, CommunicationError),
            damage=error if isinstance(error, CorruptionError) else None,
            silent=error.ranks if isinstance(error, PeerSilent) else (),
        )
        pipe.send((False, failure))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # not through atexit: the lane's thread may wait for a rank that is gone
    pipe.send((True, result))


def _text(error: BaseException) -> str:
    """Return an error of the library as one message, and any other error with its traceback."""
    if isinstance(error, StrettoError):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error)).rstrip()
