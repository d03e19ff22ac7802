"""Every option is explained."""

import re

import pytest

from stretto.cli import main

RECIPES = ("stdlib-gpt", "digits-resnet")
TRAINING = ("train", "compare", "diagnose", "simulate", "campaign")
COMMANDS = [*(f"{command} {recipe}" for command in TRAINING for recipe in RECIPES), "doctor"]


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The help of a command on one line, without frames."""
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    assert end.value.code == 0
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_docstring(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = help_of(command, capsys)
    options = re.findall(r"(?<=\s)--[a-z][-.\w]*", shown)
    assert len(options) > 5
    # What follows an option is its explanation and its default, and not its default alone.
    assert re.findall(r"(--[a-z][-.\w]*(?: \S+)?) \(default", shown) == []


@pytest.mark.parametrize("command", ["train", "compare", "diagnose"])
def test_the_help_lists_options_with_their_values_and_explanations(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = help_of(f"{command} digits-resnet", capsys)
    for option in ("--clock MIN,MAX", "--wire STR", "--task.sgd.momentum FLOAT", "--link STR"):
        assert option in shown
    assert "gradients and parameters travel; bf16 halves the bytes" in shown
