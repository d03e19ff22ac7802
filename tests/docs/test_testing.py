"""The examples of docs/testing.md run."""

from tests.docs.pages import DOCS, code_blocks


def test_the_examples_of_the_page_hold() -> None:
    for block in code_blocks(DOCS / "testing.md", "tests/docs/test_testing.py"):
        exec(compile(block, "docs/testing.md", "exec"), {})
