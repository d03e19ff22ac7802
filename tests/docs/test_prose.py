"""Prose for people in a hurry: few numbers in a paragraph, and no words that a reader has to stop at."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, README, ROOT, without_code

_START_AND_HOW_TO = re.compile(r"^  - Start:\n(.*?)^  - Understand:\n", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile(r"(?<![\w.])(?<!\w-)\d[\d.,]*")
_NOT_PROSE = re.compile(r"^(?:\||<!--|#).*$", re.MULTILINE)
_ITEM = re.compile(r"\n(?=\s*(?:[-*]|\d+\.) )")
_MARK = re.compile(r"^\s*\d+\. ")
MOST = 4


def how_to_pages() -> list[Path]:
    """The README, and the pages that the site's navigation has under Start and How to."""
    (listed,) = _START_AND_HOW_TO.findall((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    names = re.findall(r": (\S+\.md)$", listed, re.MULTILINE)
    return [README if name == "index.md" else DOCS / name for name in names]


def paragraphs(text: str) -> Iterator[str]:
    """Yield paragraphs and items of lists, without code, tables, headings and the targets of links."""
    prose = _NOT_PROSE.sub("", re.sub(r"\]\([^)]*\)", "]", without_code(text)))
    for block in re.split(r"\n\s*\n", prose):
        yield from (_MARK.sub("", item) for item in _ITEM.split(block))


def crowded(text: str) -> list[str]:
    """The paragraphs with more numbers than a reader holds in mind."""
    return [paragraph.strip() for paragraph in paragraphs(text) if len(_NUMBER.findall(paragraph)) > MOST]


@pytest.mark.parametrize("page", how_to_pages(), ids=lambda page: page.name)
def test_no_paragraph_of_a_how_to_page_has_more_than_four_numbers(page: Path) -> None:
    assert crowded(page.read_text(encoding="utf-8")) == []


def test_numbers_are_counted_in_paragraphs_items_and_descriptions_of_figures_alone() -> None:
    assert crowded("1, 2.5, 3,000 and 4 %") == []
    assert crowded("One of 2026-11-26: 1, 2.5,\n3,000 and 4 %") != []
    assert crowded("- 1, 2, 3, 4\n- 5, 6, 7, 8") == []
    assert crowded("![1, 2, 3, 4 and 5](figure.svg)") != []
    assert crowded("`1, 2, 3, 4, 5`, [a](5.md#6)\n\n| 1 | 2 | 3 | 4 | 5 |\n\n## 1 2 3 4 5") == []
    assert crowded("int4 and bf16, H100, x86-64, 1, 2, 3, 4") == []
