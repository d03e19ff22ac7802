"""Prose for people in a hurry, in pages, docstrings and messages: few numbers, and the words of the field."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.docs.pages import DOCS, README, ROOT, without_code
from tests.style.source import package_files, parsed, statements

_NUMBER = re.compile(r"(?<![\w.])(?<!\w-)\d[\d.,]*")
_NOT_PROSE = re.compile(r"^(?:\||<|#).*$", re.MULTILINE)
_ITEM = re.compile(r"\n(?=\s*(?:[-*]|\d+\.) )")
_MARK = re.compile(r"^\s*\d+\. ")
MOST = 4
FOLDERS = (".", "reference", "stories")
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    *(page for one in FOLDERS for page in sorted((DOCS / one).glob("*.md"))),
]


def paragraphs(text: str) -> Iterator[str]:
    """Yield paragraphs and items of lists, without code, tables, headings and the targets of links."""
    prose = _NOT_PROSE.sub("", re.sub(r"\]\([^)]*\)", "]", without_code(text)))
    for block in re.split(r"\n\s*\n", prose):
        yield from (_MARK.sub("", item) for item in _ITEM.split(block))


def crowded(text: str) -> list[str]:
    """The paragraphs with more numbers than a reader holds in mind."""
    return [paragraph.strip() for paragraph in paragraphs(text) if len(_NUMBER.findall(paragraph)) > MOST]


def found(pages: Iterable[Path], look: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """What is found on each page, where there is something."""
    of_pages = {str(page.relative_to(ROOT)): look(page.read_text(encoding="utf-8")) for page in pages}
    return {page: places for page, places in of_pages.items() if places}


def test_no_paragraph_of_a_page_has_more_than_four_numbers() -> None:
    assert found(PAGES, crowded) == {}


def test_numbers_are_counted_in_paragraphs_items_and_descriptions_of_figures_alone() -> None:
    assert crowded("1, 2.5, 3,000 and 4 %") == []
    assert crowded("One of 2026-11-26: 1, 2.5,\n3,000 and 4 %") != []
    assert crowded("- 1, 2, 3, 4\n- 5, 6, 7, 8") == []
    assert crowded("![1, 2, 3, 4 and 5](figure.svg)") != []
    assert crowded("`1, 2, 3, 4, 5`, [a](5.md#6)\n\n| 1 | 2 | 3 | 4 | 5 |\n\n## 1 2 3 4 5") == []
    assert crowded("int4 and bf16, H100, x86-64, 1, 2, 3, 4") == []


OTHER_VOICE = {
    r"beside": "next to, with, while",
    r"t(?:ell(?:s|ing)?|old)": "say, report, distinguish",
    r"(?:go|goes|going|went) on": "continue, resume",
    r"(?:lie|lies|lay|lying)": "is",
    r"travel\w*": "is sent",
    r"land(?:s|ed|ing)?": "arrive, is installed, is committed",
    r"take-?off|tak(?:e|es|ing) off|took off": "start, submit",
    r"under way": "in flight",
    r"aloft|torn": "in flight; stale",
    r"turns?|turned": "step a schedule",
    r"struck": "hit",
    r"bears?": "tolerate",
    r"(?:owe[sd]?|owing|debts?|laid to)": "residual, attributed to",
    r"(?:hand|hands|handed|handing) (?:over|out|on|back)": "pass, give",
    r"(?:leave|leaves|leaving|left) (?:out|behind)": "skip, omit",
    r"(?:is|are|was|were) left": "remain",
    r"in (?:the|its|their) place": "instead",
    r"of (?:its|their|your|our) own|of ours|of theirs": "its own, your own",
    r"(?:another|the other|the same|a new) one": "repeat the noun",
    r"(?:than|to|of|as|is|are|from|with|by|for|at|and) (?:that of|those (?:of|whose|that))": "name the noun",
    r"(?<!\[)what (?:is|was|are|were|has|have|had|can|one)": "name the noun",
    r"what there (?:is|are)|that there (?:is|are)": "name the noun",
    r"nobody": "no rank, no test",
    r"whoever|whatever|whichever": "name the case",
    r"becomes? of|became of": "what Stretto does with",
    r"as (?:always|it (?:is|stands|was))": "unchanged",
    r"by (?:itself|themselves|yourself)": "alone",
    r"(?:anew|afresh)": "again",
    r"the more the|next to nothing": "grows with; almost no",
    r"(?:in|by) turns?": "alternately",
    r"for as long": "while",
    r"to the digit|to be told|could not be told": "exactly; no measurable",
    r"it is so": "say the condition",
    r"a page has|stands? (?:in|on|there)": "is in",
    r"behind (?:`(?:feed|parallel)|update|step|that\b|it\b(?!,))": "after",
}
"""Words that mark English in the order of another language, and what the field says."""
_ARGUMENT = re.compile(r"^ +\w+:(?= )", re.MULTILINE)
_MARKS = re.compile(rf"\b(?:{'|'.join(OTHER_VOICE)})\b", re.IGNORECASE)


def marked(text: str) -> list[str]:
    """The places of a text in the other voice, without headings, which are questions, and tables of tests."""
    written = re.sub(r"^<!--.*-->\n(?:\|.*\n)*|^#.*$", "", without_code(text), flags=re.MULTILINE)
    prose = re.sub(r"\]\([^)]*\)", "]", written)
    words = " ".join(prose.split())
    return [words[max(0, one.start() - 40) : one.end() + 20] for one in _MARKS.finditer(words)]


def test_pages_are_written_in_the_words_of_the_field() -> None:
    assert found(PAGES, marked) == {}


def test_the_other_voice_is_heard() -> None:
    assert marked("Stretto sends gradients in 2 bits while the next ones are computed.") == []
    assert marked("`what is` and\n\n## What is public\n\n[code](what_is.md#nobody)") == []
    assert len(marked("What is left travels\nbeside the others, and nobody tells.")) >= 4


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield docstrings of modules, classes and functions, and those below fields."""
    for node in statements(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value


def messages(tree: ast.AST) -> Iterator[str]:
    """Yield every other text of several words: errors, warnings, notes, help."""
    nodes = list(ast.walk(tree))
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    passed = parts | {id(node) for node in docstrings(tree)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in passed:
            text = node.value
        else:
            continue
        if " " in text.strip():
            yield text


def of_code(file: Path) -> list[str]:
    tree = parsed(file)
    prose = (_ARGUMENT.sub("", text.value) for text in docstrings(tree))
    return [place for text in (*messages(tree), *prose) for place in marked(text)]


def test_messages_and_docstrings_are_written_in_the_words_of_the_field() -> None:
    assert {str(file): places for file in package_files() if (places := of_code(file))} == {}


def test_messages_are_texts_without_docstrings_and_names() -> None:
    source = 'def f(n):\n    """What is left."""\n    raise ValueError(f"rank {lands(n)}: " "nobody" f" {n:d} lands")\n'
    assert list(messages(ast.parse(source))) == ["rank {}: nobody {} lands"]
    assert [text.value for text in docstrings(ast.parse(source))] == ["What is left."]
