"""The command line: `stretto COMMAND ...`.

Nothing here or in `help` imports PyTorch, which takes seconds, so that the first line, the version and all help appear
at once.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import metadata
from types import MappingProxyType

from stretto.errors import ConfigError, CorruptionError, OutputClosed, StrettoError, WorkerFailed
from stretto.fields import unknown_name
from stretto.terminal import is_unread, print_to_nobody, printable
from stretto_lab.cli.estimate import print_estimate
from stretto_lab.cli.help import COMMANDS, HELP, HELP_ALL, command_help, overview
from stretto_lab.cli.options import with_files
from stretto_lab.cli.report import report_command
from stretto_lab.interrupts import INTERRUPTED, interrupts_end
from stretto_lab.patience import fold, waiting

_LIGHT: Mapping[str, Callable[[Sequence[str]], None]] = MappingProxyType(
    {"estimate": print_estimate, "report": report_command}
)
"""Commands that need no PyTorch."""
FAILED, MISUSED, DAMAGED = 1, 2, 3
"""Exit codes besides 0 and `INTERRUPTED`; see `main`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code.

    Args:
        argv: Words after the program's name; None takes the process's own.

    Returns:
        0 after success, 1 where the run failed, 2 if the options are impossible, 3 if damaged values ended it, 130
        after Ctrl-C.
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
    with _told_by_one_rank():
        if not {*HELP, HELP_ALL}.isdisjoint(words):
            named = words[0] if not words[0].startswith("-") else None
            text = command_help(name, named, whole=HELP_ALL in words)
            if text is None:  # the error says which there are
                from stretto_lab.recipes import recipe

                recipe(str(named))
            print(text or "", end="")
            return 0
        words = with_files(words)
        if name in _LIGHT:
            _LIGHT[name](words)
            return 0
        # Beside the output where somebody looks on; in a file or a pipe among the lines of the run.
        told = sys.stderr if _is_first() and sys.stderr.isatty() else sys.stdout
        if "torch" not in sys.modules:
            print("loading PyTorch", file=told, flush=True)
        with interrupts_end(), waiting("loading PyTorch", told):
            from stretto_lab.cli.commands import run_command
            from stretto_lab.train.processes import stops_exit

        with stops_exit():
            return run_command(name, words)


@contextmanager
def _told_by_one_rank() -> Iterator[None]:
    """Print only on the first rank that a launcher has started; every rank prints its own errors."""
    if _is_first():
        yield
        return
    with open(os.devnull, "w") as nobody, redirect_stdout(nobody):
        yield


def _is_first() -> bool:
    return os.environ.get("RANK" if "WORLD_SIZE" in os.environ else "SLURM_PROCID") in (None, "0")


def _version() -> str:
    try:
        return metadata.version("stretto")
    except metadata.PackageNotFoundError:
        return "of unknown version: it is not installed"


def _complain(error: Exception, exit_code: int) -> int:
    print(fold(f"stretto: {printable(str(error))}", stream=sys.stderr), file=sys.stderr)
    return exit_code
