"""Recipes by name, as data, and without their extras."""

import json
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from stretto import errors
from stretto_lab import recipes
from stretto_lab.cli.options import parse_alone

WITHOUT_EXTRAS = """
import json, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("transformers", "tokenizers", "datasets", "sklearn"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())

from stretto import errors
from stretto_lab import recipes
from stretto_lab.recipes.corpus import Text
from stretto_lab.recipes.rows import read_rows
from stretto_lab.recipes.text import Subwords

def complaint(call):
    try:
        call()
    except errors.MissingExtra as error:
        return str(error)

print(json.dumps([
    complaint(lambda: recipes.StdlibGPT(data=Text(megabytes=0.1)).build(0, 1, 0, None)),
    complaint(lambda: Subwords.trained([], 257)),
    complaint(lambda: read_rows("saved")),
    complaint(lambda: recipes.DigitsResNet().build(0, 1, 0, None)),
]))
"""


def test_a_missing_extra_names_its_install_command() -> None:
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS], capture_output=True, text=True, check=True
    )
    complaints = json.loads(process.stdout)
    for package, complaint in zip(
        ("transformers", "tokenizers", "datasets", "sklearn"), complaints, strict=True
    ):
        assert complaint.endswith(f"needs {package}: pip install 'stretto[recipes]'")


def test_a_name_gives_the_default_options() -> None:
    assert recipes.recipe("stdlib-gpt") == recipes.StdlibGPT()
    assert recipes.recipe("digits-resnet") == recipes.DigitsResNet()


def test_an_unknown_name_lists_those_that_exist() -> None:
    with pytest.raises(errors.UnknownName, match="'gpt5'; there are stdlib-gpt, digits-resnet"):
        recipes.recipe("gpt5")


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_every_field_can_be_written_as_json_and_set_from_the_command_line(name: str) -> None:
    default = recipes.recipe(name)
    assert json.loads(json.dumps(asdict(default))) is not None
    assert parse_alone("of a recipe", [], default) == default
    assert parse_alone("of a recipe", ["--lr", "0.5"], default) == replace(default, lr=0.5)
    assert parse_alone("of a recipe", ["--schedule.floor", "0.5"], default) == replace(
        default, schedule=replace(default.schedule, floor=0.5)
    )
