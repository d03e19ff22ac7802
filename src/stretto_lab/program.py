"""The command line as its own process: `stretto`, and `python -m stretto`."""

import os
import sys
from typing import NoReturn

from stretto_lab.interrupts import interrupts_end


def run() -> NoReturn:
    """Run the command that the process was started with, and end the process with its exit code."""
    with interrupts_end():
        from stretto_lab.cli import main
    try:
        code = main()
    except SystemExit as stop:
        if not isinstance(stop.code, int):
            raise
        code = stop.code
    end_process(code)


def end_process(code: int) -> NoReturn:
    """End this process, at once if `code` is the code of a stop signal.

    Taking down the interpreter takes seconds, and a thread that waits in C++ code meanwhile for a rank that has gone
    prints stacks, or ends the process by SIGABRT.
    """
    if code <= 128:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
