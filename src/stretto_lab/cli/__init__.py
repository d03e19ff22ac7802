"""The command line: `stretto COMMAND ...`.

Nothing here or in `help` imports PyTorch, which takes seconds: the first line, the version and the overview come
before.
"""

import functools
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import metadata

from stretto.errors import ConfigError, CorruptionError, OutputClosed, StrettoError, WorkerFailed
from stretto.fields import unknown_name
from stretto.terminal import is_unread, print_to_nobody, printable
from stretto_lab.cli.estimate import print_estimate
from stretto_lab.cli.help import COMMANDS, HELP, HELP_ALL, overview, plain_help
from stretto_lab.estimate import EstimateConfig
from stretto_lab.interrupts import INTERRUPTED, interrupts_end
from stretto_lab.patience import waiting

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
    # Of help, only the help itself goes to the standard output.
    if (
        "torch" not in sys.modules
        and os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
        and (not asks_help or sys.stderr.isatty())
    ):
        print("loading PyTorch", file=sys.stderr if asks_help else sys.stdout, flush=True)
    with interrupts_end(), nullcontext() if asks_help else waiting("loading PyTorch"):
        from stretto_lab.cli.commands import help_of, run_command

    if asks_help:
        print(help_of(name, words), end="")
        return 0
    return run_command(name, words)


def _version() -> str:
    try:
        return metadata.version("stretto")
    except metadata.PackageNotFoundError:
        return "of unknown version: it is not installed"


def _complain(error: Exception, exit_code: int) -> int:
    text = f"stretto: {printable(str(error))}"
    if sys.stderr.isatty():  # a terminal breaks lines within words
        columns = shutil.get_terminal_size().columns
        wrap = functools.partial(textwrap.fill, width=columns, break_long_words=False, break_on_hyphens=False)
        text = "\n".join(map(wrap, text.split("\n")))
    print(text, file=sys.stderr)
    return exit_code
