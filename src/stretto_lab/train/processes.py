"""Processes that a command starts: none of them outlives it, and the one that fails first is told.

A process ends when its block is left, by whatever error or stop signal, and when the command that started it has ended,
even by SIGKILL. What it sends comes through a pipe that only it and the command hold.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, TypeVar

import torch

from stretto.errors import WorkerFailed

PRELOAD = ("stretto_lab.train.rank", "torch._dynamo")
"""Modules that are imported once, before processes are forked. Making an optimizer imports the second, which takes
seconds."""
FIRST = ("stretto_lab.train.orphan",)
"""What the server imports before all that, so that it does not outlive a command that is killed meanwhile."""
STOPS = (signal.SIGTERM, signal.SIGHUP)
"""What asks a command to end, beside Ctrl-C."""
SAVING_SECONDS = 5.0
"""How long a process that is asked to end may go on with a save that it has begun (`HeldStops`); then it is killed."""

Given = TypeVar("Given")
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Worker:
    """One process, and our end of the pipe to it."""

    process: BaseProcess
    pipe: Connection

    def receive(self) -> Any:
        """Return what the process has sent.

        Raises:
            WorkerFailed: It has ended.
        """
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            raise WorkerFailed(_how_it_ended(self.process.exitcode)) from None


class Workers:
    """Starts processes, and ends them with its block.

    Inside the block SIGTERM and SIGHUP raise SystemExit, as Ctrl-C raises KeyboardInterrupt, so that the block is left.

    Args:
        preload: Modules that are imported once for all processes, beside `PRELOAD`.
    """

    def __init__(self, *preload: str) -> None:
        self._context = _context(preload)
        self._workers: list[Worker] = []

    def start(self, body: Callable[..., None], *args: Any) -> Worker:
        """Start a process that calls `body(pipe, *args)`; `body` must be importable, and `args` picklable."""
        _start_server()
        pipe, theirs = self._context.Pipe()
        process = self._context.Process(target=_run, args=(body, theirs, args), daemon=False)
        process.start()
        theirs.close()  # so that the process's end is the only one: its death closes the pipe
        self._workers.append(Worker(process, pipe))
        return self._workers[-1]

    def stop(self) -> None:
        """Ask all processes to end, and wait while they hold back the stop, for `SAVING_SECONDS` at most."""
        for worker in self._workers:
            worker.process.terminate()
        deadline = time.monotonic() + SAVING_SECONDS
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """Kill all processes that still run."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()


@contextmanager
def supervised(*preload: str) -> Iterator[Workers]:
    """Yield `Workers`, and end all of them with the block; `preload` is theirs."""
    with _stopped_by_signals():
        workers = Workers(*preload)
        try:
            yield workers
        except (KeyboardInterrupt, SystemExit):
            workers.stop()
            _end_fork_server()
            raise
        finally:
            workers.end()


def map_on_workers(
    function: Callable[[Given], Found], jobs: Sequence[Given], num_workers: int, *preload: str
) -> Iterator[Found]:
    """Yield `function(job)` of every job in their order; arguments and errors are those of `results_on_workers`."""
    results: dict[int, Found] = {}
    following = 0
    for index, result in filter(None, results_on_workers(function, jobs, num_workers, *preload)):
        results[index] = result
        while following in results:
            yield results.pop(following)
            following += 1


def results_on_workers(
    function: Callable[[Given], Found],
    jobs: Sequence[Given],
    num_workers: int,
    *preload: str,
    patience: float | None = None,
) -> Iterator[tuple[int, Found] | None]:
    """Yield the number of every job and `function(job)`, as they come; processes take one job after the other.

    Args:
        function: Importable; jobs and results are picklable.
        jobs: What it is called with.
        num_workers: How many processes.
        preload: Modules that are imported once for all of them.
        patience: Seconds without a result after which None is yielded; None waits.

    Raises:
        WorkerFailed: A process ended, or `function` raised; the others have ended too.
    """
    waiting = iter(enumerate(jobs))
    with supervised(*preload) as workers:
        started = [workers.start(_serve, function) for _ in range(min(num_workers, len(jobs)))]
        busy = {worker.pipe: worker for worker in started if _hand_over(worker, waiting)}
        while busy:
            ready = wait(list(busy), timeout=patience)
            if not ready:
                yield None
            for worker in [worker for pipe, worker in busy.items() if pipe in ready]:
                del busy[worker.pipe]
                index, result, trouble = worker.receive()
                if trouble is not None:
                    raise WorkerFailed(f"job {index} of {len(jobs)}: {trouble}")
                if _hand_over(worker, waiting):
                    busy[worker.pipe] = worker
                yield index, result


def _hand_over(worker: Worker, waiting: Iterator[tuple[int, Any]]) -> bool:
    """Give a worker the next job; return whether there was one."""
    job = next(waiting, None)
    if job is not None:
        with suppress(BrokenPipeError):  # it has died; who receives from it is told
            worker.pipe.send(job)
    return job is not None


def _serve(pipe: Connection, function: Callable[[Any], Any]) -> None:
    """Do jobs until the process is killed: the body of a process of `map_on_workers`."""
    torch.set_num_threads(1)  # the processes share the cores
    while True:
        index, job = pipe.recv()
        result, trouble = None, None
        try:
            result = function(job)
        except Exception as error:
            trouble = f"{type(error).__name__}: {error}"
        pipe.send((index, result, trouble))


def _context(preload: Sequence[str]) -> ForkServerContext:
    """Return how processes are started: forked from a server that has imported what they need."""
    context = multiprocessing.get_context("forkserver")
    first = (
        FIRST if threading.current_thread() is threading.main_thread() else ()
    )  # the server ends with its thread
    context.set_forkserver_preload([*first, *PRELOAD, *preload])
    return context


def _start_server() -> None:
    """Start the server, unless it runs.

    Ctrl-C reaches all processes of a terminal. The server and what it forks are born with it blocked, because each
    of them would otherwise answer with a traceback until it has come so far as to ignore it.
    """
    resource_tracker.ensure_running()  # the server would start it, and lift the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(body: Callable[..., None], pipe: Connection, args: tuple[Any, ...]) -> None:
    """Run one process."""
    # The process that started us decides; see `_start_server`.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _end_with_launcher()
    body(pipe, *args)
    sys.stdout.flush()
    sys.stderr.flush()


def _end_with_launcher() -> None:
    """End this process when the one that started it has ended, even by SIGKILL."""
    launcher = multiprocessing.parent_process()
    if launcher is None:
        return

    def watch() -> None:
        wait([launcher.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="stretto-launcher", daemon=True).start()


class HeldStops:
    """SIGTERM and SIGHUP end this process at once; while they are held back, as soon as they no longer are."""

    def __init__(self) -> None:
        self._held: list[signal.Signals] = []
        self._came: int | None = None

    def hold(self, holds: bool) -> None:
        """Hold them back from now on, or no longer."""
        if not holds:
            for number in self._held:
                signal.signal(number, signal.SIG_DFL)
            self._held = []
            if self._came is not None:
                os.kill(os.getpid(), self._came)
        elif not self._held:
            self._held = _unhandled()
            for number in self._held:
                signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = number


def _unhandled() -> list[signal.Signals]:
    """Return the stop signals that a thread may handle: none but in the main thread, and none that the program handles.

    nohup handles SIGHUP by ignoring it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return [number for number in STOPS if is_main and signal.getsignal(number) is signal.SIG_DFL]


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit in the block."""
    ours = _unhandled()

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in ours:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _end_fork_server() -> None:
    """Kill the server at once: it would first end its imports, which take seconds, and then notice that we are gone."""
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)  # it has no public way to end
    if server is not None:
        os.kill(server, signal.SIGKILL)


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"the process was killed by {signal.Signals(-exit_code).name}"
    return f"the process ended with exit code {exit_code} and without a result"
