"""Recipes of the user's own: found, imported, sent to workers, and refused in one line."""

import dataclasses
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stretto.errors import ConfigError
from stretto_lab.recipes import TaskConfig, recipe
from stretto_lab.recipes.own import digest

GOOD = """
from typing import Literal
def tiny(rank, world_size, seed, updates, *, lr: float = 0.5, kind: Literal["a", "b"] = "a", deep: int | None = None):
    '''Gives back what it got.'''
    return rank, world_size, seed, updates, lr, kind, deep
"""


@pytest.fixture(autouse=True)
def fresh_imports() -> Iterator[None]:
    """Forget the modules and folders that a test has imported from."""
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def options(name: str = "own_tiny.py:tiny", source: str = GOOD) -> TaskConfig:
    Path(name.partition(":")[0]).write_text(source)
    return recipe(name)


def test_the_arguments_after_the_star_are_options_and_the_others_come_from_the_run() -> None:
    found = options()
    assert dataclasses.asdict(found) == {"lr": 0.5, "kind": "a", "deep": None}
    assert dataclasses.replace(found, lr=0.1, deep=3).build(1, 2, 3, None) == (1, 2, 3, None, 0.1, "a", 3)
    assert isinstance(found, TaskConfig)
    with pytest.raises(ConfigError, match=r"tiny\(kind='c'\): expected one of a, b"):
        dataclasses.replace(found, kind="c")


def test_options_can_be_sent_to_a_worker_and_written_as_json() -> None:
    changed = dataclasses.replace(options(), lr=0.25)
    assert pickle.loads(pickle.dumps(changed)) == changed
    assert json.loads(json.dumps(dataclasses.asdict(changed)))["lr"] == 0.25


def test_a_dataclass_can_stand_in_the_place_of_a_function() -> None:
    source = """
import dataclasses
@dataclasses.dataclass(frozen=True)
class Tiny:
    lr: float = 0.5
    def build(self, rank, world_size, seed, updates): return self.lr
"""
    found = options("own_class.py:Tiny", source)
    assert dataclasses.replace(found, lr=0.1).build(0, 1, 0, None) == 0.1


def test_a_module_of_the_current_folder_is_found_with_its_neighbours() -> None:
    Path("own_package").mkdir()
    Path("own_package/numbers_of_mine.py").write_text("RATE = 0.125")
    Path("own_package/tasks.py").write_text(
        "from own_package.numbers_of_mine import RATE\n" + GOOD.replace("0.5", "RATE")
    )
    assert recipe("own_package.tasks:tiny").lr == 0.125


def test_a_changed_file_has_another_digest_and_is_not_run_for_it() -> None:
    Path("own_package", "inside").mkdir(parents=True)
    for name in ("__init__", "inside/__init__", "inside/tasks", "other"):
        Path(f"own_package/{name}.py").write_text("raise SystemExit('imported')")
    for place, name in (
        ("own_package/other.py:f", "other"),
        ("own_package.inside.tasks:f", "inside/tasks"),
        ("own_package.inside:f", "inside/__init__"),
    ):
        known = digest(place)
        assert known is not None
        with Path(f"own_package/{name}.py").open("a") as file:
            file.write("\n")
        assert digest(place) not in (known, None), place
    for place in (
        "own_gone.py:f",
        "own_package.gone:f",
        "own_package.other.gone:f",
        "own_gone:f",
        "own_package:f",
    ):
        assert (digest(place) is None) == ("gone" in place), place


ARGUMENTS = "rank, world_size, seed, updates"


@pytest.mark.parametrize(
    ("name", "source", "said"),
    [
        (
            "own_typo.py:tinny",
            GOOD,
            r"own_typo.py has no recipe 'tinny'; there are tiny; did you mean 'tiny'\?",
        ),
        ("own_bare.py", GOOD, r"own_bare.py needs the name of a function, as own_bare.py:tiny"),
        (
            "own_syntax.py:f",
            "def f(:\n",
            r"cannot import own_syntax.py: SyntaxError: .*own_syntax.py, line 1",
        ),
        ("own_raises.py:f", "\n1 / 0\n", r"ZeroDivisionError: division by zero, .*own_raises.py line 2"),
        (
            "own_none.py:f",
            f"def f({ARGUMENTS}, *, lr: float): ...",
            r"option lr of f needs a type and a default",
        ),
        (
            "own_untyped.py:f",
            f"def f({ARGUMENTS}, *, lr=1): ...",
            r"option lr of f needs a type and a default",
        ),
        (
            "own_wrong.py:f",
            f"def f({ARGUMENTS}, *, lr: float = 'fast'): ...",
            r"f\(lr='fast'\): expected a number",
        ),
        (
            "own_short.py:f",
            "def f(rank, seed): ...",
            r"f\(rank, seed\): a recipe takes rank, world_size, seed and",
        ),
        ("own_dotted.name.py:tiny", GOOD, r"rename the file"),
        ("statistics.py:tiny", GOOD, r"statistics.py cannot be imported as 'statistics'"),
        ("own_plain.py:F", "class F: pass", r"own_plain.py:F is a class without fields and build"),
    ],
)
def test_what_is_no_recipe_is_refused_in_one_line(name: str, source: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        options(name, source)
    assert len(str(caught.value).splitlines()) == 1


def test_a_file_that_is_not_there_is_answered_with_one_that_is() -> None:
    Path("own_there.py").write_text(GOOD)
    with pytest.raises(
        ConfigError, match=r"there is no recipe file own_their.py; did you mean 'own_there.py'\?"
    ):
        recipe("own_their.py:tiny")
