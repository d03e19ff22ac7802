"""Ranks as real processes: the harness of every test that needs more than one rank.

``run_ranks`` is for ranks that should succeed, ``rank_outcomes`` for tests in which some rank is meant to raise,
exit or die. A rank's function must be importable (defined at the top level of a test module) and its arguments and
result picklable. ``Command`` runs a whole program, as a user starts it, but with its imports already made.
"""

import faulthandler
import gc
import importlib
import logging
import multiprocessing
import os
import pickle
import re
import runpy
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Self

import torch
import torch.distributed as dist

from stretto.exchange.rotated import Rotated
from stretto_lab.train import processes as started_by_commands
from stretto_lab.train.processes import Workers
from stretto_lab.train.workers import host_store

TIMEOUT_SECONDS = 240.0
"""For a machine that others keep busy; nobody waits for it when all is well."""

# A server forks each rank with what is slow to import already there: 0.1 s per rank, not 3 s. Where there is a CUDA
# device, modules look for it at import, and CUDA refuses processes that are forked after that.
_CONTEXT = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "forkserver")

_FORKED_WITH = (
    "stretto_lab.train.rank",
    "stretto_lab.cli.commands",
    "stretto_lab.testing",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "sklearn.datasets",
    "transformers.models.auto.modeling_auto",
    "transformers.models.gpt2.modeling_gpt2",
)
"""What ranks in processes of their own would each take seconds to import, beside what tests do."""


_WAITS = re.compile(r"\d:\d\d (so far|since then|of about)")


def start_server_of_ranks(*more: str) -> None:
    """Branch off the server that all ranks are forked from, before the first test: it knows nothing of any test.

    Args:
        more: Modules that are slow to import, beside those that tests need.
    """
    with warnings.catch_warnings(action="ignore"):  # those of other libraries
        for name in (*_FORKED_WITH, *more):
            importlib.import_module(name)
    for bits in (1, 2, 3, 4):  # compiled once, and not by each rank
        wire = Rotated(bits)
        wire.write(torch.zeros(64), torch.empty(wire.num_bytes(64), dtype=torch.uint8))
    resource_tracker.ensure_running()  # the server would start it
    start, forkserver.util.spawnv_passfds = forkserver.util.spawnv_passfds, _forked_server
    try:
        forkserver.ensure_running()
    finally:
        forkserver.util.spawnv_passfds = start


def without_waits(lines: Iterable[str]) -> Iterator[str]:
    """Yield what a command prints but for the lines that only say how long it has waited: those of a busy machine."""
    yield from (line for line in lines if not _WAITS.search(line))


class RankFailed(AssertionError):
    """A rank raised, died or did not end in time; the message holds its traceback."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one rank."""

    rank: int
    value: Any = None
    """What the function returned; None for a rank that failed."""
    error: str | None = None
    """Traceback of the exception that left the function, or how the process ended; None if it returned."""
    finished: float = float("inf")
    """When the parent learned of the end, seconds of ``time.monotonic``; lower is earlier."""


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What every rank does."""

    world_size: int
    port: int
    backend: str | None
    prepare: Callable[[], Any] | None
    function: Callable[..., Any]
    args: tuple[Any, ...]


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    backend: str | None = "gloo",
    prepare: Callable[[], Any] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> list[Any]:
    """Call ``function(rank, *args)`` in ``world_size`` processes and return the results in rank order.

    Each process has as many torch threads as this one was given and, unless ``backend`` is None, an initialised
    default group. ``prepare()`` is called before that, to register a backend.

    Raises:
        RankFailed: with the traceback of the rank that failed first; the others are killed at the end.
    """
    outcomes = rank_outcomes(
        world_size,
        function,
        *args,
        backend=backend,
        prepare=prepare,
        timeout_seconds=timeout_seconds,
        wait_for_all=False,
    )
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if failed:
        first = min(failed, key=lambda outcome: outcome.finished)
        raise RankFailed(f"rank {first.rank} of {world_size} failed:\n{first.error}")
    return [outcome.value for outcome in outcomes]


def run_program(
    world_size: int, program: Callable[[int, dist.ProcessGroup], Any], **launch: Any
) -> list[Any]:
    """Call ``program(rank, group)`` in ``world_size`` processes, each handed its default group; see ``run_ranks``."""
    return run_ranks(world_size, _on_default_group, program, **launch)


def _on_default_group(rank: int, program: Callable[[int, dist.ProcessGroup], Any]) -> Any:
    return program(rank, dist.group.WORLD)


def rank_outcomes(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    backend: str | None = "gloo",
    prepare: Callable[[], Any] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    wait_for_all: bool = True,
) -> list[Outcome]:
    """Like ``run_ranks``, but report every rank's end instead of raising.

    Args:
        wait_for_all: Keep waiting for the other ranks after one has failed; False kills them.
    """
    # The parent hosts the store, so that it outlives any rank, and the system chooses the port.
    store = host_store("127.0.0.1", 0)
    job = _Job(
        world_size=world_size, port=store.port, backend=backend, prepare=prepare, function=function, args=args
    )
    ranks: dict[Connection, tuple[int, Any]] = {}
    for rank in range(world_size):
        receiver, sender = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_rank_main, args=(sender, rank, job))
        with Workers.children:
            process.start()
        sender.close()
        ranks[receiver] = (rank, process)
    try:
        return _collect(ranks, time.monotonic() + timeout_seconds, wait_for_all)
    finally:
        for _, process in ranks.values():
            process.kill()
            with Workers.children:
                process.join()


def _collect(ranks: dict[Connection, tuple[int, Any]], deadline: float, wait_for_all: bool) -> list[Outcome]:
    pending = dict(ranks)
    outcomes: dict[int, Outcome] = {}
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        for connection in ready:
            rank, process = pending.pop(connection)
            outcomes[rank] = _outcome(connection, rank, process)
        failed = any(outcome.error is not None for outcome in outcomes.values())
        if not ready or (failed and not wait_for_all):
            break
    for rank, _ in pending.values():
        outcomes[rank] = Outcome(rank=rank, error="still running when the harness stopped waiting")
    return [outcomes[rank] for rank in sorted(outcomes)]


def _outcome(connection: Connection, rank: int, process: Any) -> Outcome:
    try:
        error, value = pickle.loads(connection.recv_bytes())
    except EOFError:
        with Workers.children:
            process.join()
        error, value = f"the process ended with exit code {process.exitcode} and no result", None
    return Outcome(rank=rank, value=value, error=error, finished=time.monotonic())


def _rank_main(sender: Connection, rank: int, job: _Job) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        if job.prepare is not None:
            job.prepare()
        if job.backend is not None:
            store = dist.TCPStore("127.0.0.1", job.port, is_master=False, timeout=timedelta(seconds=60))
            dist.init_process_group(job.backend, store=store, rank=rank, world_size=job.world_size)
            dist.barrier()  # a rank that is done at once must not close before the others have connected
        result = (None, job.function(rank, *job.args))
    except BaseException:
        result = (traceback.format_exc(), None)
    # Plain pickle copies tensors; multiprocessing's own would share them and fail once this process is gone.
    sender.send_bytes(pickle.dumps(result))
    if result[0] is None and dist.is_initialized():
        dist.destroy_process_group()


class Command:
    """A program in a process of its own, forked from the warm server: what it imports is there already.

    It leads a session, as a program in a terminal does, and what it prints comes through pipes. Its workers come from a
    fork server of its own, which branches off before the program's first line and so knows nothing of it. Used as a
    block, which kills the program and its workers at the end.

    Args:
        words: A script and its arguments, or ``-m``, a module and its arguments, as after ``python``.
        function: Called in place of a program; importable.
        variables: Of the environment, beside those of this process.
    """

    def __init__(
        self, *words: str, function: Callable[[], Any] | None = None, variables: dict[str, str] | None = None
    ) -> None:
        out, their_out = _CONTEXT.Pipe(duplex=False)
        err, their_err = _CONTEXT.Pipe(duplex=False)
        body = (their_out, their_err, os.environ | (variables or {}), words, function)
        self._process = _CONTEXT.Process(target=_command_main, args=body)
        with Workers.children:
            self._process.start()
        for end in (their_out, their_err):
            end.close()
        self.stdout, self.stderr = (os.fdopen(os.dup(end.fileno()), encoding="utf-8") for end in (out, err))
        self.pid = self._process.pid

    def communicate(self) -> tuple[str, str]:
        """Return what is printed from now on, once neither the program nor a worker of it can print any more."""
        printed = self.stdout.read(), self.stderr.read()
        self.wait()
        return printed

    def wait(self) -> int:
        """Return the exit code; that of a signal is negative."""
        self._process.join(TIMEOUT_SECONDS)
        return self._process.exitcode

    @property
    def returncode(self) -> int:
        """See ``wait``."""
        return self.wait()

    def kill(self) -> None:
        """Kill the program, and not its workers, which notice."""
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):  # all have ended, as they should
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()
        for end in (self.stdout, self.stderr):
            end.close()


@contextmanager
def launched(world_size: int, *words: str, **given: Any) -> Iterator[list[Command]]:
    """Start a program on ranks that know of each other what a launcher of another kind tells them."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    told["WORLD_SIZE"] = str(world_size)
    with ExitStack() as stack:
        yield [
            stack.enter_context(Command(*words, variables={**told, "RANK": str(rank)}, **given))
            for rank in range(world_size)
        ]


def _command_main(
    out: Connection,
    err: Connection,
    variables: dict[str, str],
    words: tuple[str, ...],
    function: Callable[[], Any] | None,
) -> None:
    os.setsid()
    for number, end in enumerate((out, err), start=1):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(variables)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    forkserver.util.spawnv_passfds = _forked_server
    started_by_commands._start_server()
    if function is not None:
        function()
    elif words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")


def _forked_server(path: str, args: list[str], passed: list[int]) -> int:
    """Start multiprocessing's fork server by a fork instead of a new interpreter, which would import all again."""
    server = os.fork()
    if server == 0:
        for low, high in zip([2, *sorted(passed)], [*sorted(passed), os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(low + 1, high)
        forkserver._forkserver.__init__()  # its lock was taken when we branched off
        _forget_pytest()
        gc.freeze()  # a rank whose garbage collector walked through all that would copy it
        try:
            exec(args[-1])
        finally:
            os._exit(0)
    return server


def _forget_pytest() -> None:
    """Undo, in a process that is forked from it, what pytest does to its own: its files are closed here."""
    sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))
    faulthandler.disable()
    importlib.reload(warnings)  # every one was an error
    for reference in logging._handlerList:
        handler = reference()
        if type(handler) is logging.StreamHandler:
            handler.setStream(sys.stderr)
        elif type(handler).__module__ == "_pytest.logging":
            handler.setLevel(sys.maxsize)  # it would write into what has the number of its file by now
