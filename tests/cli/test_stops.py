"""A command that is stopped leaves no process behind and no traceback; experiments/stop_signals.py stops all."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.draws import part
from tests.processes import Command

TINY = f"{Path(__file__).parents[1] / 'train' / 'tiny.py'}:Tiny"
LONG = ["--updates", "1000000", "--no-tensorboard", "--run-dir", "run"]
TRAIN = ["train", TINY, *LONG]
COMPARE = ["compare", TINY, "--updates", "1000000", "--strategies", "ddp,acco"]
SIMULATE = ["simulate", TINY, "--updates", "1000000"]


IMPORTING = ("loading PyTorch", "starting the workers")
"""Lines after which a command or its fork server imports for seconds."""


def started(words: list[str], line: str) -> "subprocess.Popen[str] | Command":
    """Start a command in a session of its own, as a terminal does; from nothing where imports are to be met."""
    return (from_nothing if line in IMPORTING else with_imports_made)(words)


def from_nothing(words: list[str]) -> "subprocess.Popen[str]":
    """Start a command in a new interpreter."""
    command = [sys.executable, "-m", "stretto", *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, start_new_session=True, **pipes)


def with_imports_made(words: list[str]) -> Command:
    """Start a command in a process that has PyTorch already."""
    return Command("-m", "stretto", *words)


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(
    ("words", "line", "number", "code", "last"),
    [
        (SIMULATE, "loading PyTorch", signal.SIGINT, 130, "interrupted\n"),
        (COMPARE, "repeat 1 of ", signal.SIGINT, 130, "interrupted\n"),
        (TRAIN, "starting the workers", signal.SIGHUP, 129, ""),
        (TRAIN, "update 1/", signal.SIGTERM, 143, ""),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_stop_signal_to_all_processes_ends_them_without_a_traceback(
    words: list[str], line: str, number: int, code: int, last: str
) -> None:
    with started(words, line) as command:
        try:
            assert any(shown.startswith(line) for shown in command.stdout)
            os.killpg(command.pid, number)
            # All processes write to the same pipes, so they end when the last of them has.
            _, complaint = command.communicate()
        finally:
            command.kill()
    assert complaint == last
    # Where the signal comes before the first worker is started, there is nothing to clear away: the system ends it.
    assert command.returncode in ((code,) if number == signal.SIGINT else (code, -number))


@pytest.mark.parametrize("line", part(["update 1/", "loading PyTorch"]))
def test_a_command_whose_output_nobody_reads_ends_in_one_line(line: str) -> None:
    with started(TRAIN, line) as command:
        try:
            assert any(shown.startswith(line) for shown in command.stdout)
            command.stdout.close()
            (complaint,) = command.stderr.read().splitlines()
        finally:
            command.kill()
    assert command.returncode == 1
    assert complaint.startswith("stretto: ")
    assert "the pipe or terminal of the output is closed" in complaint
