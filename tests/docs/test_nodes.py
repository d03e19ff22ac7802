"""The example in docs/nodes.md runs, and its commands take the virtual seconds that the page tells."""

import re

import pytest

from stretto.cli import main
from tests.docs.pages import DOCS, code_blocks, commands

PAGE = DOCS / "nodes.md"


def test_the_example_runs() -> None:
    (source,) = code_blocks(PAGE, "tests/docs/test_nodes.py")
    exec(compile(source, str(PAGE), "exec"), {})


def test_the_commands_take_the_seconds_that_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    for words in commands(PAGE):
        assert main(words) == 0
    taken = re.findall(r"updates in ([\d.]+) virtual s", capfd.readouterr().out)
    assert f"The first takes {taken[0]} virtual seconds, the second {taken[1]}." in PAGE.read_text()
