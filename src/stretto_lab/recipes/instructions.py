"""How a row becomes text: a document to learn whole, or an instruction and the answer to learn.

An instruction is set in headings, as Alpaca does without its first sentence:

    ### Instruction:
    Name three colours.

    ### Response:
    Red, green and blue.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

Row = Mapping[str, Any]


class Turn(NamedTuple):
    """A row as text: what is given, and what is to be learned."""

    prompt: str
    """No loss is taken of it; empty where all is to be learned."""

    response: str
    """A document, or the answer to the prompt."""


Reading = Callable[[Row], Turn]
"""How a row becomes text."""


def read_text(row: Row, column: str) -> Turn:
    """Return a document; one that is missing is empty."""
    return Turn("", row[column] or "")


def read_pair(row: Row) -> Turn:
    """Return a prompt as it is, and the response to it."""
    return Turn(row["prompt"] or "", row["response"] or "")


def read_instruction(row: Row) -> Turn:
    """Return an instruction, with its input where there is one, set in headings."""
    parts = [("Instruction", row["instruction"]), ("Input", row.get("input"))]
    headed = "".join(f"### {title}:\n{text}\n\n" for title, text in parts if text)
    return Turn(f"{headed}### Response:\n", row["output"] or "")


READINGS: Mapping[tuple[str, ...], Reading] = MappingProxyType(
    {("prompt", "response"): read_pair, ("instruction", "output"): read_instruction}
)
"""What rows of instructions are known by: their columns."""
