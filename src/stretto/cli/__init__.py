"""The command line: `stretto COMMAND ...`."""

import sys
from collections.abc import Callable, Sequence
from importlib import metadata

USAGE = """\
usage: stretto COMMAND [RECIPE] [OPTIONS]
       stretto --version

commands:
  train      train a recipe on local workers, or as a rank of torchrun
  compare    run strategies side by side on the same link
  simulate   train a recipe on a virtual cluster of many ranks
  diagnose   measure whether the input is the bottleneck, and what an echo would gain
  campaign   strike small jobs with seeded faults and see whether guards keep their promises; a recipe may be left out
  doctor     find out whether this machine's arithmetic, memory and network can be trusted; takes no recipe

`stretto COMMAND --help` lists the recipes, `stretto COMMAND RECIPE --help` all options.
"""

RECIPE_USAGE = """\
usage: stretto {command} RECIPE [OPTIONS]

recipes: {recipes}

`stretto {command} {first} --help` lists all options.
"""

TAKES_RECIPE = ("train", "compare", "simulate", "diagnose")
HELP = ("-h", "--help")
FAILED, MISUSED, DAMAGED, INTERRUPTED = 1, 2, 3, 130
"""Exit codes beside 0; see `main`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code.

    Args:
        argv: Words after the program's name; None takes the process's own.

    Returns:
        0 after success, 1 where the run failed, 2 where what was asked for cannot be, 3 where damaged values ended it,
        130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in HELP:
        print(USAGE, end="")
        return 0 if words else MISUSED
    if words[0] == "--version":
        print(f"stretto {_version()}")
        return 0
    # Not earlier: the help needs none of what the commands are made of.
    from stretto.cli.commands import (
        campaign_command,
        compare_command,
        diagnose_command,
        doctor_command,
        simulate_command,
        train_command,
    )
    from stretto.errors import ConfigError, CorruptionError, StrettoError, WorkerFailed
    from stretto.fields import unknown_name
    from stretto.recipes import RECIPES

    commands: dict[str, Callable[[Sequence[str]], int | None]] = {
        "train": train_command,
        "compare": compare_command,
        "simulate": simulate_command,
        "diagnose": diagnose_command,
        "campaign": campaign_command,
        "doctor": doctor_command,
    }
    try:
        if words[0] not in commands:
            raise unknown_name("no command is called", words[0], commands)
        if words[0] in TAKES_RECIPE and words[1:2] and words[1] in HELP:
            listed = {"recipes": ", ".join(RECIPES), "first": next(iter(RECIPES))}
            print(RECIPE_USAGE.format(command=words[0], **listed), end="")
            return 0
        return commands[words[0]](words[1:]) or 0
    except ConfigError as error:
        return _complain(error, MISUSED)
    except StrettoError as error:
        damaged = isinstance(error, CorruptionError) or (isinstance(error, WorkerFailed) and error.damages)
        return _complain(error, DAMAGED if damaged else FAILED)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _version() -> str:
    try:
        return metadata.version("stretto")
    except metadata.PackageNotFoundError:
        return "of unknown version: it is not installed"


def _complain(error: Exception, exit_code: int) -> int:
    print(f"stretto: {error}", file=sys.stderr)
    return exit_code
