"""The command line: `stretto COMMAND ...`.

Nothing here or in `help` imports PyTorch, which takes seconds: the first line, the version and the overview come
before.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from importlib import metadata

from stretto.errors import ConfigError, CorruptionError, OutputClosed, StrettoError, WorkerFailed
from stretto.fields import unknown_name
from stretto.terminal import is_unread, print_to_nobody, printable
from stretto_lab.cli.estimate import print_estimate
from stretto_lab.cli.help import COMMANDS, HELP, HELP_ALL, overview, plain_help
from stretto_lab.estimate import EstimateConfig
from stretto_lab.interrupts import INTERRUPTED, interrupts_end
from stretto_lab.patience import fold, waiting

FAILED, MISUSED, DAMAGED = 1, 2, 3
"""Exit codes beside 0 and `INTERRUPTED`; see `main`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code.

    Args:
        argv: Words after the program's name; None takes the process's own.

    Returns:
        0 after success, 1 where the run failed, 2 where what was asked for cannot be, 3 where damaged values ended it,
        130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in (*HELP, HELP_ALL):
        print(overview(), end="")
        return 0 if words else MISUSED
    if words[0] == "--version":
        print(f"stretto {_version()}")
        return 0
    try:
        code = _run(words[0], words[1:])
        sys.stdout.flush()
        return code
    except ConfigError as error:
        return _complain(error, MISUSED)
    except StrettoError as error:
        damaged = isinstance(error, CorruptionError) or (isinstance(error, WorkerFailed) and error.damages)
        return _complain(error, DAMAGED if damaged else FAILED)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError:
        if not is_unread():
            raise
        print_to_nobody()
        return _complain(OutputClosed(), FAILED)


def _run(name: str, words: Sequence[str]) -> int:
    if name not in COMMANDS:
        raise unknown_name("no command is called", name, COMMANDS)
    asks_help = not {*HELP, HELP_ALL}.isdisjoint(words)
    if name == "estimate":  # which needs no PyTorch
        if asks_help:
            print(plain_help(name, EstimateConfig(), whole=HELP_ALL in words), end="")
        else:
            print_estimate(words)
        return 0
    with _told_by_one_rank():
        # Of help, only the help itself goes to the standard output.
        told = sys.stderr if asks_help else sys.stdout
        is_told = not asks_help or told.isatty()
        if "torch" not in sys.modules and is_told:
            print("loading PyTorch", file=told, flush=True)
        with interrupts_end(), waiting("loading PyTorch", told) if is_told else nullcontext():
            from stretto_lab.cli.commands import help_of, run_command

        if asks_help:
            print(help_of(name, words), end="")
            return 0
        from stretto_lab.train.processes import stops_exit

        with stops_exit():
            return run_command(name, words)


@contextmanager
def _told_by_one_rank() -> Iterator[None]:
    """Let the first of the ranks that a launcher has started print what it does; errors are each rank's own."""
    rank = os.environ.get("RANK" if "WORLD_SIZE" in os.environ else "SLURM_PROCID")
    if rank in (None, "0"):
        yield
        return
    with open(os.devnull, "w") as nobody, redirect_stdout(nobody):
        yield


def _version() -> str:
    try:
        return metadata.version("stretto")
    except metadata.PackageNotFoundError:
        return "of unknown version: it is not installed"


def _complain(error: Exception, exit_code: int) -> int:
    print(fold(f"stretto: {printable(str(error))}", stream=sys.stderr), file=sys.stderr)
    return exit_code
