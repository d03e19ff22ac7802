"""Worker processes: start one per rank, join the others in a process group, and name the rank that fails first.

No process stays behind: workers end with the process that started them, and after a failure of one of them.
"""

import dataclasses
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any, Literal, TypeVar

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from stretto.errors import CommunicationError, CorruptionError, StrettoError, WorkerFailed
from stretto.groups import Link, register_throttled


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


def host_store(host: str, port: int) -> TCPStore:
    """Open the store at which ranks meet; it lives as long as the returned object. Port 0 lets the system choose."""
    return TCPStore(host, port, is_master=True, wait_for_workers=False)


@contextmanager
def joined_group(info: RankInfo, link: Link, device: torch.device, timeout_seconds: float) -> Iterator[None]:
    """Join the other ranks in torch's default process group for the length of the block.

    On a CPU the group is Gloo behind `link`; a link without limits only counts the bytes that are sent.

    Raises:
        CommunicationError: The store or a rank does not answer in time.
    """
    timeout = timedelta(seconds=timeout_seconds)
    register_throttled(link)
    try:
        store = TCPStore(info.host, info.port, is_master=False, timeout=timeout)
        dist.init_process_group(
            "throttled" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            store=PrefixStore(f"stretto/{info.store_prefix}", store),
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


def choose_device(kind: Literal["auto", "cpu", "cuda"], info: RankInfo) -> torch.device:
    """Return this rank's device; auto takes CUDA where every local rank finds a device of its own."""
    found = torch.cuda.device_count()
    if kind == "cpu" or (kind == "auto" and found < info.local_world_size):
        return torch.device("cpu")
    device = torch.device("cuda", info.local_rank % max(1, found))
    torch.cuda.set_device(device)
    return device


T = TypeVar("T")

PRELOAD = ("stretto.train.rank", "torch._dynamo")
"""Modules that are imported once, before workers are forked. Making an optimizer imports the second, which takes
seconds."""
GRACE_SECONDS = 10.0
"""How long the other workers may take to notice a failure and report it; then they are killed."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Failure:
    """How a worker ended that did not return."""

    text: str
    """For people."""
    is_consequence: bool = False
    """Whether another rank's failure is the cause."""
    damage: CorruptionError | None = None
    """The error, where damaged values are the cause."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Worker:
    """One process, and our end of the pipe on which it reports."""

    rank: int
    process: BaseProcess
    reports: Connection


def worker_context(*preload: str) -> ForkServerContext:
    """Return how workers are started: forked from a server that has imported `PRELOAD` and the modules named here."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, *preload])
    return context


def run_workers(function: Callable[..., T], infos: Sequence[RankInfo], *args: Any) -> list[T]:
    """Call `function(info, *args)` in one process per info and return the results in the order of infos.

    Args:
        function: Importable, like its arguments and result picklable.
        infos: The ranks to start on this machine; other machines may have more.
        args: The same for every rank.

    Raises:
        WorkerFailed: Names the rank that failed first, and the cause. All other workers have ended too.
    """
    context = worker_context()
    workers: list[_Worker] = []
    try:
        for info in infos:
            reports, sender = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(sender, function, info, args), daemon=False)
            process.start()
            sender.close()  # so that the worker's end is the only one: its death closes the pipe
            workers.append(_Worker(rank=info.rank, process=process, reports=reports))
        return [results for results in _collect(workers)]
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()
            worker.reports.close()


def _collect(workers: Sequence[_Worker]) -> list[Any]:
    """Wait for every worker's report; after the first failure, for `GRACE_SECONDS` at most."""
    pending = {worker.reports: worker for worker in workers}
    results: dict[int, Any] = {}
    failures: dict[int, _Failure] = {}
    deadline: float | None = None
    while pending:
        ready = wait(list(pending), None if deadline is None else max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for reports in [reports for reports in pending if reports in ready]:
            worker = pending.pop(reports)
            succeeded, report = _report(worker)
            (results if succeeded else failures)[worker.rank] = report
        if failures and deadline is None:
            deadline = time.monotonic() + GRACE_SECONDS
    if failures:
        damages = [failure.damage for failure in failures.values() if failure.damage is not None]
        raise WorkerFailed(_describe(failures, len(workers)), damages)
    return [results[worker.rank] for worker in workers]


def _report(worker: _Worker) -> tuple[bool, Any]:
    """Return whether a worker succeeded, with its result or failure."""
    try:
        succeeded, report = worker.reports.recv()
    except EOFError:
        worker.process.join()
        return False, _Failure(text=_how_it_ended(worker.process.exitcode))
    return succeeded, report


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"the process was killed by {signal.Signals(-exit_code).name}"
    return f"the process ended with exit code {exit_code} and without a result"


def _describe(failures: dict[int, _Failure], num_workers: int) -> str:
    """Return the message: the first failure that is not the consequence of another one, then the others."""
    causes = {rank: failure for rank, failure in failures.items() if not failure.is_consequence} or failures
    rank, cause = next(iter(causes.items()))
    text = f"rank {rank} of {num_workers} local workers failed: {cause.text}"
    for other in sorted(set(causes) - {rank}):
        if causes[other].text != cause.text:
            text += f"\nrank {other} failed too: {causes[other].text.splitlines()[-1]}"
    return text


def _work(sender: Connection, function: Callable[..., Any], info: RankInfo, args: tuple[Any, ...]) -> None:
    """Run one worker: the body of its process."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all processes; the one that started us decides
    _end_with_launcher()
    try:
        result = function(info, *args)
    except BaseException as error:
        failure = _Failure(
            text=_text(error),
            is_consequence=isinstance(error, CommunicationError),
            damage=error if isinstance(error, CorruptionError) else None,
        )
        sender.send((False, failure))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # not through atexit: the lane's thread may wait for a rank that is gone
    sender.send((True, result))


def _end_with_launcher() -> None:
    """End this process when the one that started it has ended, even by SIGKILL."""
    launcher = multiprocessing.parent_process()
    if launcher is None:
        return

    def watch() -> None:
        wait([launcher.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="stretto-launcher", daemon=True).start()


def _text(error: BaseException) -> str:
    """Return an error of the library as one message, and any other error with its traceback."""
    if isinstance(error, StrettoError):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error)).rstrip()
