"""The example of docs/testing.md is collected and passes."""

from typing import Any

from tests.docs.pages import DOCS, code_blocks


def test_the_example_checks_a_strategy() -> None:
    names: dict[str, Any] = {"__name__": "page"}
    defines, runs = code_blocks(DOCS / "testing.md", "tests/docs/test_testing.py")
    exec(compile(defines, "docs/testing.md", "exec"), names)
    names["TestMyStrategy"].world_sizes = (2,)
    exec(compile(runs, "docs/testing.md", "exec"), names)
    assert "test_staleness_is_what_it_declares" in names["TestMyStrategy"].checks()
