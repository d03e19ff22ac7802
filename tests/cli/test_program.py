"""A command that is stopped while it imports, or whose interpreter would still be taken down, ends at once."""

import subprocess
import sys

import pytest

SWALLOWED = """
import signal
from stretto_lab.interrupts import interrupts_end

with interrupts_end():
    try:
        signal.raise_signal(signal.SIGINT)
    except BaseException:  # as some modules in C++ do
        print("half imported")
print("went on")
"""
TAKEN_DOWN = """
import atexit
from stretto_lab.program import end_process

atexit.register(print, "taken down")
print("last line")
end_process({code})
"""


def ended(program: str) -> "subprocess.CompletedProcess[str]":
    """Run a program of Python."""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_an_interrupt_ends_an_import_that_would_swallow_it() -> None:
    end = ended(SWALLOWED)
    assert (end.returncode, end.stdout, end.stderr) == (130, "", "interrupted\n")


def test_after_the_imports_an_interrupt_is_raised_again() -> None:
    end = ended(SWALLOWED.replace("with interrupts_end():", "with interrupts_end(): pass\nif True:"))
    assert (end.returncode, end.stdout, end.stderr) == (0, "half imported\nwent on\n", "")


@pytest.mark.parametrize(("code", "more"), [(0, "taken down\n"), (3, "taken down\n"), (130, ""), (143, "")])
def test_only_a_stop_signal_keeps_the_interpreter_from_being_taken_down(code: int, more: str) -> None:
    end = ended(TAKEN_DOWN.format(code=code))
    assert (end.returncode, end.stdout, end.stderr) == (code, "last line\n" + more, "")
