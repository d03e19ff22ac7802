"""The worked example of docs/adding-a-strategy.md runs, and its own assertions hold."""

from typing import Any

from stretto.strategies import Strategy
from tests.docs.pages import DOCS, code_blocks

BLOCKS = code_blocks(DOCS / "adding-a-strategy.md", "tests/docs/test_adding_a_strategy.py")


def test_the_example_trains_and_equals_its_equation_to_the_bit() -> None:
    names: dict[str, Any] = {"__name__": "example"}
    for block in BLOCKS:
        exec(compile(block, "docs/adding-a-strategy.md", "exec"), names)
    assert issubclass(names["PipeSGD"], Strategy)
    assert len(BLOCKS) == 4
