"""Processes that a command starts: none of them outlives the command, and the first failure is reported.

A process ends when its block ends, by any error or stop signal, and when its command ends, even by SIGKILL. It sends
its result through a pipe that only it and the command hold.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, TypeVar

from stretto.errors import WorkerFailed
from stretto_lab.lifeline import end_with_parent

PRELOAD = ("stretto_lab.train.rank", "torch._dynamo")
"""Modules that are imported once, before processes are forked. An optimizer would import the second, which takes
seconds."""
FIRST = ("stretto_lab.train.orphan",)
"""Modules that the server imports before all others, so that it ends with a command that is killed meanwhile."""
STOPS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a command to end, besides Ctrl-C."""
SAVING_SECONDS = 5.0
"""Seconds that a process may take for its last writes after it is asked to end; then it is killed."""

Given = TypeVar("Given")
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Worker:
    """One process, and the command's end of the pipe to it."""

    process: BaseProcess
    pipe: Connection

    def receive(self) -> Any:
        """Return an object that the process has sent.

        Raises:
            WorkerFailed: The process has ended.
        """
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.join()
            raise WorkerFailed(_how_it_ended(self.process.exitcode)) from None

    def join(self) -> None:
        """Wait until the process has ended; only one thread at a time may ask."""
        wait([self.process.sentinel])
        with Workers.children:
            self.process.join()


class Workers:
    """Starts processes, and ends them with its block.

    Inside the block SIGTERM and SIGHUP raise SystemExit, as Ctrl-C raises KeyboardInterrupt, so that the block ends.
    After the block they have their earlier effect.

    Args:
        preload: Modules that are imported once for all processes, in addition to `PRELOAD`.
    """

    children = threading.Lock()
    """Guards this process's children: a start polls other children, and if two threads poll, only one receives the exit
    code."""

    def __init__(self, *preload: str) -> None:
        self._context = _context(preload)
        self._workers: list[Worker] = []
        self.stop_signal: int | None = None
        """The received signal, if processes may finish their update."""
        self._may_land = False

    def start(self, body: Callable[..., None], *args: Any) -> Worker:
        """Start a process that calls `body(pipe, *args)`; `body` must be importable, and `args` picklable."""
        _start_server()
        pipe, theirs = self._context.Pipe()
        process = self._context.Process(target=_run, args=(body, theirs, args), daemon=False)
        with self.children:
            process.start()
        theirs.close()  # so that the process's end is the only one: its death closes the pipe
        self._workers.append(Worker(process, pipe))
        return self._workers[-1]

    def let_land(self) -> None:
        """Allow the processes to finish their update after a stop signal; before this call, the first signal ends them
        at once.
        """
        self._may_land = True

    def ask_to_land(self, number: int) -> None:
        """Pass the first stop signal on to all processes, which may finish their update and save (`Stops`); the second
        one raises.
        """
        is_first, self.stop_signal = self.stop_signal is None, number
        if not (is_first and self._may_land):
            self.raise_stop()
        for worker in self._workers:
            worker.process.terminate()

    def raise_stop(self) -> None:
        """Raise the received stop signal, if there is one.

        Raises:
            KeyboardInterrupt: It was Ctrl-C. SystemExit: It was another signal.
        """
        if self.stop_signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self.stop_signal is not None:
            raise SystemExit(128 + self.stop_signal)

    def stop(self) -> None:
        """Ask all processes to end, and wait for processes that delay the stop, for at most `SAVING_SECONDS`."""
        for worker in self._workers:
            worker.process.terminate()
        deadline = time.monotonic() + SAVING_SECONDS
        for worker in self._workers:
            wait([worker.process.sentinel], max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """Kill all processes that still run."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.join()
            worker.pipe.close()


@contextmanager
def supervised(*preload: str, lands: bool = False) -> Iterator[Workers]:
    """Yield `Workers`, and end all of them with the block.

    Args:
        preload: As in `Workers`.
        lands: Whether to pass the first stop signal on, so that the processes may finish their update and save, and to
            raise it after the block; the second signal ends all at once.
    """
    workers = Workers(*preload)
    with _stopped_by_signals(workers if lands else None):
        try:
            yield workers
            workers.raise_stop()
        except (KeyboardInterrupt, SystemExit):
            if not lands:
                workers.stop()
            _end_fork_server()
            raise
        except WorkerFailed:
            workers.raise_stop()  # they were told to end
            raise
        finally:
            workers.end()


def _context(preload: Sequence[str]) -> ForkServerContext:
    """Return the method of starting processes: it forks them from a server that has imported their modules."""
    context = multiprocessing.get_context("forkserver")
    # The server ends with its thread.
    first = FIRST if threading.current_thread() is threading.main_thread() else ()
    context.set_forkserver_preload([*first, *PRELOAD, *preload])
    return context


def _start_server() -> None:
    """Start the server, unless it runs.

    Ctrl-C reaches all processes of a terminal. The server and its forks start with it blocked: otherwise each would
    print a traceback until it has set its own handler.
    """
    resource_tracker.ensure_running()  # the server would start it, and lift the block
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(body: Callable[..., None], pipe: Connection, args: tuple[Any, ...]) -> None:
    # The process that started us decides; see `_start_server`.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    body(pipe, *args)
    sys.stdout.flush()
    sys.stderr.flush()


class Stops:
    """Whether a stop signal has come to this process. The process continues: its loop checks from time to time, and can
    finish its update and save.
    """

    def __init__(self) -> None:
        self.has_come = False
        for number in _unhandled():
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True


def _unhandled() -> list[signal.Signals]:
    """Return the stop signals that this thread may handle: none outside the main thread, none that the program handles.

    nohup handles SIGHUP by ignoring it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return [number for number in STOPS if is_main and signal.getsignal(number) in (signal.SIG_DFL, exit_by)]


def exit_by(number: int, frame: FrameType | None) -> None:
    """Handle a stop signal in a command: unfinished work is undone, and the exit code names the signal.

    Raises:
        SystemExit: Always.
    """
    raise SystemExit(128 + number)


@contextmanager
def stops_exit() -> Iterator[None]:
    """Let stop signals raise SystemExit during the block, which runs a command."""
    before = _unhandled()
    for number in before:
        signal.signal(number, exit_by)
    try:
        yield
    finally:
        for number in before:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _stopped_by_signals(landing: Workers | None) -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit during the block, or first pass them and Ctrl-C to `landing`."""
    before: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in _unhandled()}
    if landing is not None and signal.getsignal(signal.SIGINT) is signal.default_int_handler and before:
        before[signal.SIGINT] = signal.default_int_handler

    came: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if landing is None:
            exit_by(number, frame)
        else:
            landing.ask_to_land(number)

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for stopped in set(came) - {signal.SIGINT}:
            signal.raise_signal(stopped)


def _end_fork_server() -> None:
    """Kill the server at once: otherwise it would complete its imports, which take seconds, and then notice the end."""
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)  # it has no public way to end
    if server is not None:
        os.kill(server, signal.SIGKILL)


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"the process was killed by {signal.Signals(-exit_code).name}"
    return f"the process ended with exit code {exit_code} and without a result"
