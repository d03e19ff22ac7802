"""Processes that a command starts: none of them outlives the command, and the first failure is reported.

A process ends when its block ends, by any error or stop signal, and when its command ends, even by SIGKILL. It sends
its result through a pipe that only it and the command hold.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
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

    A process that is stopped may finish its update and save (`Stops`) once all have been started; see `supervised`.
    """

    children = threading.Lock()
    """Guards this process's children: a start polls other children, and if two threads poll, only one receives the exit
    code."""

    def __init__(self) -> None:
        self._context = _context()
        self._workers: list[Worker] = []
        self.stop_signal: int | None = None
        """The last received signal."""
        self._are_started = False

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

    def are_started(self) -> None:
        """Hear that all processes have been started."""
        self._are_started = True

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Handle a stop signal: pass the first one on to all processes, and raise the second."""
        is_first, self.stop_signal = self.stop_signal is None, number
        if not (is_first and self._are_started):
            self.raise_stop()
        for worker in self._workers:
            worker.process.terminate()

    def raise_stop(self) -> None:
        """Raise the received stop signal, if there is one.

        Raises:
            KeyboardInterrupt: It was Ctrl-C.
            SystemExit: It was another signal.
        """
        if self.stop_signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self.stop_signal is not None:
            raise SystemExit(128 + self.stop_signal)

    def end(self) -> None:
        """Kill all processes that still run."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.join()
            worker.pipe.close()


@contextmanager
def supervised() -> Iterator[Workers]:
    """Yield `Workers`, and end all of them with the block.

    The first SIGTERM, SIGHUP or Ctrl-C is passed on, so that the processes may finish their update and save. When the
    block has ended it is raised: Ctrl-C as KeyboardInterrupt, another with its earlier effect. A second one, or one
    before all have been started, ends all at once.
    """
    workers = Workers()
    handlers: dict[signal.Signals, Any] = {number: signal.getsignal(number) for number in _unhandled()}
    if handlers and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        handlers[signal.SIGINT] = signal.default_int_handler
    for number in handlers:
        signal.signal(number, workers.stop)
    try:
        yield workers
        workers.raise_stop()
    except (KeyboardInterrupt, SystemExit):
        _end_fork_server()
        raise
    except WorkerFailed:
        workers.raise_stop()  # they were told to end
        raise
    finally:
        workers.end()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if workers.stop_signal not in (None, signal.SIGINT):
            signal.raise_signal(workers.stop_signal)


def _context() -> ForkServerContext:
    """Return how processes are started: forked from a server that has imported what they need."""
    context = multiprocessing.get_context("forkserver")
    # The server ends with its thread.
    first = FIRST if threading.current_thread() is threading.main_thread() else ()
    context.set_forkserver_preload([*first, *PRELOAD])
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


def _end_fork_server() -> None:
    """Kill the server at once: otherwise it would complete its imports, which take seconds, and then notice the end."""
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)  # it has no public way to end
    if server is not None:
        os.kill(server, signal.SIGKILL)


def _how_it_ended(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"the process was killed by {signal.Signals(-exit_code).name}"
    return f"the process ended with exit code {exit_code} and without a result"
