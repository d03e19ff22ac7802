"""The scripts of `examples/`, run as a user runs them."""

import subprocess
import sys

from tests.style.source import ROOT

EXAMPLES = ROOT / "examples"


def printed(*words: str, launcher: tuple[str, ...] = ()) -> list[str]:
    """Run a script in the test's own folder and return the lines that it prints.

    Args:
        words: The script's path in `examples/`, and its arguments.
        launcher: The module that starts the script, and its arguments; none for a plain process.
    """
    before = ("-m", *launcher) if launcher else ()
    script, *arguments = words
    ended = subprocess.run(
        [sys.executable, *before, str(EXAMPLES / script), *arguments], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()
