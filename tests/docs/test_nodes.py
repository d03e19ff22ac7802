"""The examples in docs/nodes.md run, and its commands take the virtual seconds that the page tells."""

import re

import pytest

from stretto_lab.cli import main
from tests.docs.pages import DOCS, code_blocks, commands

PAGE = DOCS / "nodes.md"


def test_the_examples_run_one_after_the_other() -> None:
    names: dict[str, object] = {}
    for source in code_blocks(PAGE, "tests/docs/test_nodes.py"):
        exec(compile(source, str(PAGE), "exec"), names)
        names["parallel"].finish()


@pytest.mark.long
def test_the_commands_take_the_seconds_that_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    for words in commands(PAGE):
        assert main(words) == 0
    taken = re.findall(r"updates in ([\d.]+) virtual s", capfd.readouterr().out)
    assert f"The first takes {taken[0]} virtual seconds, the second {taken[1]}." in PAGE.read_text()
    assert f"The third takes {taken[2]} virtual seconds, the fourth {taken[3]}:" in PAGE.read_text()
