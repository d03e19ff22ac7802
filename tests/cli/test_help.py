"""Every option is explained."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from stretto.campaign import CampaignConfig
from stretto.cli import main
from stretto.cli.options import field_docs
from stretto.doctor import Examination
from stretto.recipes import RECIPES
from stretto.train.configuration import CompareConfig, DiagnoseConfig, RunConfig
from stretto.train.simulation import SimulateConfig


def configurations(value: Any) -> Iterator[Any]:
    """A configuration and all that are nested in it."""
    yield value
    for field in dataclasses.fields(value):
        if dataclasses.is_dataclass(getattr(value, field.name)):
            yield from configurations(getattr(value, field.name))


@pytest.mark.parametrize("kind", [RunConfig, CompareConfig, DiagnoseConfig, SimulateConfig, CampaignConfig])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_field_has_a_docstring(kind: Any, recipe: str) -> None:
    for configuration in configurations(kind(task=RECIPES[recipe]())):
        docs = field_docs(type(configuration))
        assert [field.name for field in dataclasses.fields(configuration) if not docs.get(field.name)] == []


def test_every_option_of_the_doctor_has_a_docstring() -> None:
    assert set(field_docs(Examination)) == {field.name for field in dataclasses.fields(Examination)}


@pytest.mark.parametrize("command", ["train", "compare", "diagnose"])
def test_the_help_lists_every_option_with_its_explanation(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "digits-resnet", "--help"])
    assert end.value.code == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for option in ("--clock MIN,MAX", "--wire {fp32,bf16,int8}", "--task.sgd.momentum FLOAT", "--link STR"):
        assert option in shown
    assert "gradients and parameters travel; bf16 halves the bytes" in shown
