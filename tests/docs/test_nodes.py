"""The examples in docs/nodes.md run, and its commands take the virtual seconds that the page tells."""

import re

import pytest

from stretto_lab.cli import main
from tests.docs.pages import DOCS, commands

PAGE = DOCS / "nodes.md"


@pytest.mark.long
def test_the_commands_take_the_seconds_that_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    for words in commands(PAGE):
        assert main(words) == 0
    taken = re.findall(r"updates in ([\d.]+) virtual s", capfd.readouterr().out)
    assert f"The first takes {taken[0]} virtual seconds, the second {taken[1]}." in PAGE.read_text()
    assert f"The third takes {taken[2]} virtual seconds, the fourth {taken[3]}:" in PAGE.read_text()
