"""The recipe that docs/recipes.md builds from nothing is trained by the commands that the page prints."""

import shlex
from pathlib import Path

import pytest

from stretto.cli import main
from stretto.observe import read_json_lines
from tests.docs.pages import DOCS, code_blocks

PAGE = DOCS / "recipes.md"
MARKER = "tests/docs/test_recipes.py"


def test_the_commands_of_the_page_train_its_recipe(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,) = code_blocks(PAGE, MARKER)
    monkeypatch.syspath_prepend(str(Path.cwd()))  # taken back at the end, with the file's folder
    Path("line.py").write_text(source)
    (block,) = PAGE.read_text().partition("\nThen:\n")[2].split("```")[1:2]
    commands = [shlex.split(line)[1:] for line in block.strip().splitlines()]
    shown = []
    for words in commands:
        assert main(words) == 0
        shown.append(capfd.readouterr().out)
    losses = [row["heldout_loss"] for row in read_json_lines(Path("first/evaluations.jsonl"))]
    assert losses[-1] < losses[0] / 100
    assert [row["step"] for row in read_json_lines(Path("first/updates.jsonl"))] == list(range(1, 91))
    assert "--task.lr FLOAT           Learning rate of SGD [0.1]" in shown[2]
    assert "acco on 8 virtual ranks, network internet" in shown[3]
