"""Every program and every command of docs/tutorial.md runs, but the installation."""

import re
from pathlib import Path

import pytest

from stretto.cli import main
from stretto.observe import read_json_lines
from tests.docs.pages import DOCS, code_blocks, commands
from tests.processes import Command

PAGE = DOCS / "tutorial.md"
TEXT = PAGE.read_text(encoding="utf-8")
TRAINED, SIMULATED = (
    [words for words in commands(PAGE) if words[0] == name] for name in ("train", "simulate")
)


@pytest.fixture(autouse=True)
def programs() -> None:
    """Save both programs under the names that the page gives them."""
    names = re.findall(r"`(\w+\.py)`[:.]", TEXT)
    for name, source in zip(names, code_blocks(PAGE, "tests/docs/test_tutorial.py"), strict=True):
        Path(name).write_text(source)


def loss(*words: str) -> float:
    """Run a program, and return the loss that it prints."""
    with Command(*words) as command:
        shown, complaint = command.communicate()
    assert command.returncode == 0, complaint
    return float(shown.removeprefix("loss "))


def test_both_loops_print_the_same_loss_and_two_processes_another_one() -> None:
    assert "python points.py\npython ours.py\n" in TEXT
    assert "torchrun --nproc-per-node 2 ours.py\n" in TEXT
    plain, ours = loss("points.py"), loss("ours.py")
    together = loss("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "ours.py")
    assert plain == ours
    assert together != ours
    assert together == pytest.approx(ours, rel=0.5)  # half as many updates of the same training


def test_both_ways_of_training_behind_the_link_learn_the_same_and_the_hidden_one_sends_less() -> None:
    for words in TRAINED:
        assert main(words) == 0
    waits, hides = ([*read_json_lines(Path(name, "updates.jsonl"))] for name in ("waits", "hides"))
    assert [row["step"] for row in waits] == [row["step"] for row in hides] == list(range(1, 17))
    assert sum(row["sent_bytes"] for row in hides) < sum(row["sent_bytes"] for row in waits)
    for name in ("waits", "hides"):
        first, *_, last = [row["heldout_loss"] for row in read_json_lines(Path(name, "evaluations.jsonl"))]
        assert last < first / 4


def test_the_simulations_take_the_seconds_and_wait_as_long_as_the_page_says(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for words in SIMULATED:
        assert main(words) == 0
    shown = capfd.readouterr().out
    seconds = re.findall(r"updates in ([\d.]+) virtual s", shown)
    waited = re.findall(r"waited for communication ([\d.]+)%", shown)
    assert "take {}, {} and {} virtual seconds".format(*seconds) in TEXT
    assert "{} %, {} % and {} % of the time waits".format(*waited) in TEXT
