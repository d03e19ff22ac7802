"""Help fits a screen, explains every option, and names every choice."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.echo.text import PLANS
from stretto.exchange import WIRES
from stretto.fields import unknown_name
from stretto.guards import GUARDS
from stretto.strategies import STRATEGIES
from stretto_lab.cli import main
from stretto_lab.cli.commands import CONFIGURE
from stretto_lab.cli.help import COMMANDS
from stretto_lab.cli.options import options_of, shown
from stretto_lab.cli.written import Sources
from stretto_lab.peers import PEERS
from stretto_lab.recipes import RECIPES, recipe
from stretto_lab.train.arms import AUTO

LINES, COLUMNS = 40, 80
TAKE_RECIPE = [name for name, command in COMMANDS.items() if "RECIPE" in command.takes]
ASKED = [*COMMANDS, *(f"{name} {known}" for name in TAKE_RECIPE for known in RECIPES)]


def help_of(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words.split()) == 0
    shown, complaint = capsys.readouterr()
    assert complaint == ""
    return shown


@pytest.mark.parametrize("command", ["", *ASKED])
@pytest.mark.parametrize("asks", ["--help", "-h"])
def test_help_fits_one_screen(command: str, asks: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = help_of(f"{command} {asks}", capsys).splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS


@pytest.mark.parametrize("command", ASKED)
def test_help_all_explains_every_option_in_80_columns(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = help_of(f"{command} --help-all", capsys)
    assert max(map(len, shown.splitlines())) <= COLUMNS
    name, _, named = command.partition(" ")
    options = list(options_of(CONFIGURE[name](recipe(named or "digits-resnet"))))
    # An option's explanation begins on its own line or on the next.
    explained = dict(re.findall(r"^  (--[a-z][-.\w]*)\b.*?(?:  |\n {20,})(\S[^\n]*)", shown, re.MULTILINE))
    wanted = [option.name for option in options if named or not option.name.startswith("--task.")]
    assert [option for option in wanted if explained.get(option, "[")[0] == "["] == []


@pytest.mark.parametrize(
    ("command", "option", "choices"),
    [
        ("train", "strategy", [*STRATEGIES, AUTO]),
        ("simulate", "strategy", STRATEGIES),
        ("diagnose", "strategy", STRATEGIES),
        ("compare", "strategies", PEERS),
        ("train", "guards", GUARDS),
        ("train", "echo", PLANS),
        ("train", "wire", WIRES),
    ],
)
def test_the_screen_names_every_choice(
    command: str, option: str, choices: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    shown = help_of(f"{command} --help", capsys)
    (text,) = re.findall(rf"^  --{option} (.*?)(?=^  --|^$)", shown, re.MULTILINE | re.DOTALL)
    assert [choice for choice in choices if not re.search(rf"(?<![-\w]){choice}(?![-\w])", text)] == []


@pytest.mark.parametrize("command", TAKE_RECIPE)
def test_help_without_a_recipe_lists_the_recipes_and_that_of_a_recipe_its_options(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = help_of(f"{command} --help", capsys)
    assert [name for name in (*RECIPES, "FILE.py:FUNCTION") if f"\n  {name} " not in shown] == []
    assert "--task." not in shown
    assert "--task.width" in help_of(f"{command} digits-resnet --help", capsys)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name != "resume"])
@pytest.mark.parametrize("named", RECIPES)
def test_help_tells_the_options_and_defaults_that_a_command_has(command: str, named: str) -> None:
    written = [*Sources().options(COMMANDS[command].record)]
    if command in TAKE_RECIPE:
        written += Sources().options(Sources().recipes()[named], "--task.")
    found = {one.name: (one.default, not one.metavar) for one in written}
    options = options_of(CONFIGURE[command](recipe(named)))
    assert found == {one.name: (shown(one.default), one.is_switch) for one in options}


def test_help_and_lists_need_no_pytorch() -> None:
    Path("own.py").write_text(
        "import torch\n\ndef sine(rank, world_size, seed, updates, *, hidden: int = 32):\n"
        '    """Fits.\n\n    Args:\n        hidden: Neurons.\n    """\n'
    )
    program = """
import sys

class NoTorch:
    def find_spec(self, name, *_):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is blocked")

sys.meta_path.insert(0, NoTorch())
from stretto_lab.cli import main
print([main(words.split()) for words in sys.argv[1:]])
"""
    asked = ["", "--help", "--version", "own.py", *(f"{one} --help-all" for one in ASKED)]
    asked += ["train own.py:sine --help-all", "estimate"]
    done = subprocess.run([sys.executable, "-c", program, *asked], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("torch")) == (0, 0), done.stderr
    assert done.stdout.splitlines()[-1] == str([2, 0, 0, 2] + [0] * (len(asked) - 4))
    assert "--task.hidden INT         Neurons. [32]" in done.stdout


def test_on_a_terminal_a_message_is_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, terminal = os.openpty()
    with open(reading, "rb", buffering=0) as screen, open(terminal, "w") as stderr:
        monkeypatch.setattr("sys.stderr", stderr)
        monkeypatch.setenv("COLUMNS", "60")
        assert main(["trian"]) == 2
        stderr.flush()
        lines = screen.read(4096).decode().splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 60
    assert " ".join(lines) == str(unknown_name("stretto: no command is called", "trian", COMMANDS))
