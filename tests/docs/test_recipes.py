"""What docs/recipes.md prints is run: the recipe that it builds from nothing, and commands over files of such names."""

import shlex
from pathlib import Path

import pytest

from stretto_lab.cli import main
from stretto_lab.cli.commands import CONFIGURE
from stretto_lab.cli.options import parse_options
from stretto_lab.observe import read_json_lines
from stretto_lab.recipes import RECIPES
from stretto_lab.train.handle import check_run
from tests.docs.pages import DOCS, code_blocks, commands
from tests.recipes.files import smaller, train_virtually, write_stories

PAGE = DOCS / "recipes.md"
MARKER = "tests/docs/test_recipes.py"


@pytest.mark.long
def test_the_commands_of_the_page_train_its_recipe(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,) = (block for block in code_blocks(PAGE, MARKER) if block.startswith("import"))
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


OVER_FILES = [words for words in commands(PAGE) if words[1] == "language"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the commands are typed."""
    root = tmp_path_factory.mktemp("page")
    write_stories(root)
    return root


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("words", OVER_FILES, ids=" ".join)
def test_a_command_over_files_trains_with_less_of_everything(
    words: list[str], files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    _, run = parse_options("train", words[1:], CONFIGURE["train"])
    check_run(run, 2)
    first, second = train_virtually(smaller(run, 1), 2)
    assert first.updates == second.updates == 1


def test_the_lengths_of_the_page_are_those_of_runs() -> None:
    given = {"--updates", "--samples"}
    printed = [words for words in commands(PAGE) if given & set(words) and words[1] in RECIPES]
    runs = [parse_options("train", words[1:], CONFIGURE["train"])[1] for words in printed]
    for run in runs:
        check_run(run, 2)
    assert [run.samples for run in runs] == [4000, 3000]
