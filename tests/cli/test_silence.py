"""No command is silent for more than ten seconds, whatever takes long: a loader, measurements, processes that start."""

import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from io import StringIO

import pytest

from stretto_lab import patience
from stretto_lab.cli import main
from stretto_lab.cli.help import COMMANDS
from stretto_lab.observe import Stages
from stretto_lab.patience import clock, fold
from tests.draws import seeds
from tests.processes import launched

LAW = 10.0
AT_ONCE = 3
SMALL = "digits-resnet --task.width 4 --task.batch 8 --workers 1 --micro-batches 1"
RUN = "--updates 1 --evaluate-every None --slow-loader 11000"
LISTENED: Mapping[str, str] = {
    "train": f"{SMALL} {RUN} --run-dir runs/first --checkpoint-every 1",
    "resume": "runs/first --updates 2",
    "compare": f"{SMALL} {RUN} --strategies zero1 --out compared",
    "diagnose": f"{SMALL} --batches 1 --slow-loader 3000",
    "plan": f"{SMALL} --batches 1 --slow-loader 5000 --ranks 2 --network 10mbit",
    "simulate": "digits-resnet --ranks 4 --updates 3",
    "report": "runs/first --out page.html",
    "estimate": "--ranks 8",
}
"""With something that takes longer than the law allows, where a command can be made to."""
AFTER = ("resume", "report")
"""Those that need what another one has left."""


def longest_silence(name: str) -> float:
    """The longest time between two outputs of a command, its start and its end among them."""
    words = [sys.executable, "-m", "stretto", name, *LISTENED[name].split()]
    moments, heard = [time.monotonic()], b""
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as command:
        assert command.stdout is not None
        while part := command.stdout.read1():
            moments.append(time.monotonic())
            heard += part
    assert command.returncode == 0, heard.decode()
    assert b"read the same batches" not in heard
    moments.append(time.monotonic())
    return max(after - before for before, after in itertools.pairwise(moments))


@pytest.mark.long
@pytest.mark.timeout(900)  # where the machine is busy, PyTorch alone takes half a minute to load
def test_no_command_is_silent_for_ten_seconds() -> None:
    assert LISTENED.keys() == COMMANDS.keys() - {"meet"}  # which waits for good, and says so first
    silences: dict[str, float] = {}
    for names in ([name for name in LISTENED if name not in AFTER], AFTER):
        with ThreadPoolExecutor(AT_ONCE) as threads:
            found = threads.map(longest_silence, names)
            silences |= dict(zip(names, found, strict=True))
    assert {name: seconds for name, seconds in silences.items() if seconds > LAW} == {}


def drawn_lines(draw: random.Random, count: int) -> list[str]:
    """Lines of words, some of which hold hyphens, some longer than a terminal is wide."""
    return [" ".join("x-" * draw.randint(1, 6) for _ in range(draw.randint(0, 40))) for _ in range(count)]


@pytest.mark.parametrize("seed", seeds(20))
def test_a_terminal_gets_lines_that_fit_and_a_file_or_a_pipe_one_line_per_event(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    columns, indent = draw.randint(20, 200), draw.choice((0, 2, 6))
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = drawn_lines(draw, 4)
    text = "\n".join(lines)
    assert fold(text, indent=indent, stream=StringIO()) == text
    terminal = StringIO()
    terminal.isatty = lambda: True
    folded = fold(text, indent=indent, stream=terminal)
    assert max(map(len, folded.split("\n"))) <= min(80, columns)
    assert folded.split() == text.split()
    assert folded.split("\n") == [
        part for line in lines for part in fold(line, indent=indent, stream=terminal).split("\n")
    ]
    assert {len(part) - len(part.lstrip()) for line in lines for part in folds(line, indent, terminal)} <= {
        indent
    }


def folds(line: str, indent: int, terminal: StringIO) -> list[str]:
    """The lines after the first that one line is folded into."""
    return fold(line, indent=indent, stream=terminal).split("\n")[1:]


@pytest.mark.long
def test_on_a_terminal_what_is_waited_for_is_told_beside_the_output() -> None:
    hurried = "from stretto_lab import patience; patience.SECONDS = 0.05"
    asks = f"{hurried}; from stretto_lab.cli import main; main(['train', 'digits-resnet', '--updates', '0'])"
    reading, terminal = os.openpty()
    with open(reading, "rb", buffering=0) as screen, open(terminal, "w") as stderr:
        shown = subprocess.run([sys.executable, "-c", asks], stdout=subprocess.PIPE, stderr=stderr, text=True)
        told = screen.read(4096).decode()
    assert "loading PyTorch: 0:00 so far" in told
    assert "must be at least 1, found 0" in told
    assert shown.stdout == ""


def impatient() -> None:
    """Train, and tell of everything that takes longer than a moment."""
    patience.SECONDS = 0.001
    code = main(["train", *SMALL.split(), "--updates", "1", "--run-dir", "launched", "--no-tensorboard"])
    sys.exit(code)


def test_of_the_ranks_of_a_launcher_only_the_first_says_what_it_waits_for() -> None:
    with launched(2, function=impatient) as ranks:
        first, second = (rank.communicate() for rank in ranks)
        assert [rank.returncode for rank in ranks] == [0, 0], (first, second)
    assert "starting the workers: 0:0" in first[0]
    assert second[0] == ""


def test_hidden_stages_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Stages(is_shown=False) as stages:
        stages.begin("pricing")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("seconds", "text"), [(-1, "0:00"), (59.6, "1:00"), (3725, "1:02:05")])
def test_a_clock_shows_hours_where_there_are_any(seconds: float, text: str) -> None:
    assert clock(seconds) == text
