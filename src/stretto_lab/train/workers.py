"""Ranks in processes: start one process per rank, join them in a group, and name the rank that fails first."""

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
    """The number of a process's rank, and the store where the ranks meet."""

    rank: int
    """This rank, from 0."""
    world_size: int
    """Number of ranks."""
    local_rank: int
    """Position among the ranks of this machine; it decides the rank's device."""
    local_world_size: int
    """Number of ranks on this machine."""
    host: str
    """Address of the store."""
    port: int
    """Port of the store."""
    store_prefix: str = ""
    """Prefix of all keys in the store, so that successive jobs on one store do not read each other's keys."""
    seat: int | None = None
    """Number of the process, if a dead process is replaced; None is its rank."""


def host_store(host: str, port: int) -> TCPStore:
    """Open the store where ranks meet; it exists as long as the returned object. Port 0 lets the system choose.

    A store for the ranks of one machine listens at an address that no other machine reaches. Any other store listens at
    all addresses, because `host` may be a name that only the other machines know.

    PyTorch's store looks up the name of each client, and answers no client meanwhile: without a resolver this takes
    seconds. It reads a loopback address from the system's table of hosts, but only if it listens for IPv4 alone.
    """
    if not _is_loopback(host):
        # Torch connects to its own store too, and would try for five minutes where `host` does not lead back here.
        return TCPStore(_LOOPBACK, port, is_master=True, wait_for_workers=False)
    listener = socket.create_server((host, port), backlog=_BACKLOG)
    port = listener.getsockname()[1]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


_BACKLOG = 1024
"""Number of connections that may wait, since all ranks connect at once."""
_LOOPBACK = "127.0.0.1"


def address_of(info: RankInfo) -> str | None:
    """Return the address where a rank's groups listen; None if Gloo chooses it, because other machines take part."""
    return _LOOPBACK if _is_loopback(info.host) else None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


@contextmanager
def joined_group(info: RankInfo, link: Link, device: torch.device, timeout_seconds: float) -> Iterator[None]:
    """Join the other ranks in PyTorch's default process group during the block.

    On a CPU the group is Gloo behind `link`; a link without limits only counts the sent bytes. If the store is at a
    loopback address, all ranks are on this machine, and Gloo listens at that address alone.

    Raises:
        CommunicationError: The store or a rank does not answer in time.
        ConfigError: The link has limits, and the devices are not CPUs.
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
    """Return the store where the ranks of a job meet, with the job's prefix."""
    store = TCPStore(info.host, info.port, is_master=False, timeout=timeout)
    return PrefixStore(f"stretto/{info.store_prefix}", store)


DeviceKind = Literal["auto", "cpu", "cuda"]
CPU_WORKERS = 2
"""Local workers if no device decides their number: the fewest that communicate."""


def local_workers(chosen: int | None, kind: DeviceKind) -> int:
    """Return the number of workers to start on this machine: the chosen number, or else one per CUDA device."""
    if chosen is not None:
        return chosen
    return (0 if kind == "cpu" else torch.cuda.device_count()) or CPU_WORKERS


def device_of(kind: DeviceKind, local_rank: int, local_world_size: int) -> torch.device:
    """Return a rank's device; auto uses CUDA if every local rank has its own device.

    Raises:
        ConfigError: There are fewer CUDA devices than local ranks, and NCCL needs one for each.
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
    """Return this rank's device, and make it the current one; see `device_of`."""
    device = device_of(kind, info.local_rank, info.local_world_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def described_device(device: torch.device, kind: DeviceKind, local_world_size: int) -> str:
    """Return a description of the device; if the machine has CUDA devices that are not used, with the reason."""
    if device.type == "cuda":
        return f"cuda, {torch.cuda.get_device_name(device)}"
    found = torch.cuda.device_count()
    if kind == "auto" and found:
        return f"cpu: {found} CUDA device{'s' * (found > 1)} for {local_world_size} workers"
    return "cpu"


T = TypeVar("T")

TELLING_SECONDS = 1.0
"""Seconds to wait until the other ranks know of a dead rank: the store may be in this process, and end with it."""
GRACE_SECONDS = 5.0
"""Seconds that the other ranks may take to notice and report a failure; then they are killed. They look for failures
once a second, and may need two and a half seconds to find the cause (`stretto.engine.failures`)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The end of a rank that did not return."""

    text: str
    """The message."""
    is_consequence: bool = False
    """Whether another rank's failure is the cause."""
    damage: CorruptionError | None = None
    """The error, if damaged values are the cause."""
    silent: tuple[int, ...] = ()
    """Ranks that have stopped answering, so that no report from them is awaited."""


def run_workers(function: Callable[..., T], infos: Sequence[RankInfo], *args: Any) -> list[T]:
    """Call `function(info, *args)` in one process per info, and return the results in the order of infos.

    Args:
        function: Importable, like its arguments and result picklable.
        infos: The ranks to start on this machine; other machines may have more.
        args: The same for every rank.

    Raises:
        WorkerFailed: Names the rank that failed first, and the cause. All other processes have ended too.
    """
    with supervised() as workers:
        with waiting("starting the workers"):  # they import PyTorch anew
            started = {info.rank: workers.start(work, function, info, args) for info in infos}
        workers.are_started()
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
    """Return whether a rank succeeded, with its result or failure; `told` receives the process that reports its end to
    the others.
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
    """Report to the other ranks that this rank has ended, and how."""
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
    """Run one rank; this is the body of its process."""
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
