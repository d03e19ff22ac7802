"""Commands that are started as a terminal would, to be killed: all of their processes can be found and waited for.

Launchers are forked from this process, which has imported PyTorch already. Linux only: processes are found in /proc.
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import stretto_lab.cli.commands  # noqa: F401  # what a launcher needs is imported once, here
from stretto_lab.cli import main as stretto_main

POLL_SECONDS = 0.001
PATIENCE_SECONDS = 120.0


class Launched:
    """A command in a session of its own, as a terminal would start it.

    Args:
        words: Behind `stretto`.
        log: A file for all that its processes print.
    """

    def __init__(self, words: Sequence[str], log: Path) -> None:
        self.log = log
        self.code: int | None = None
        self.started = time.time_ns()
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(_command(words, log))

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal, or None while it runs."""
        if self.code is None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.code = os.waitstatus_to_exitcode(ended[1])
        return self.code

    def wait(self) -> int:
        """Wait for the end, and return the exit code."""
        until(lambda: self.poll() is not None, f"the end of {self.log}")
        return self.code or 0

    def processes(self) -> list[int]:
        """Return all of its processes that still run."""
        return [pid for pid, _, session in _running() if session == self.pid]

    def workers(self) -> list[int]:
        """Return the workers' process ids in rank order: the children of the server that forks them."""
        found = _running()
        servers = {pid for pid, parent, _ in found if parent == self.pid}
        return sorted(pid for pid, parent, _ in found if parent in servers)


def _command(words: Sequence[str], log: Path) -> int:
    """Be the launcher."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stream = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(stream, descriptor)
    try:
        return stretto_main(words)
    except SystemExit as error:
        return int(error.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _running() -> list[tuple[int, int, int]]:
    """Return process id, parent and session of every process that has not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in brackets may hold anything.
            state, parent, _, session, *_ = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended since
            continue
        if state not in "ZX":
            found.append((int(stat.parent.name), int(parent), int(session)))
    return found


def until(is_over: Callable[[], bool], what: str) -> float:
    """Wait, and return the seconds that it took.

    Raises:
        TimeoutError: It took too long.
    """
    started = time.monotonic()
    while not is_over():
        if time.monotonic() - started > PATIENCE_SECONDS:
            raise TimeoutError(what)
        time.sleep(POLL_SECONDS)
    return time.monotonic() - started
