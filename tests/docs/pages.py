"""The pages that people read, taken apart: tables, code blocks and links."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"


def pages() -> list[Path]:
    """Every page, the README first."""
    return [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def table(page: Path, marker: str) -> list[dict[str, str]]:
    """The rows of the table below the comment `<!-- table: marker -->`, by column title."""
    head, *rows = _lines(page, marker)
    return [dict(zip(head, row, strict=True)) for row in rows]


def cells(page: Path, marker: str) -> list[list[str]]:
    """The same without titles."""
    return _lines(page, marker)[1:]


def _lines(page: Path, marker: str) -> list[list[str]]:
    _, _, below = page.read_text(encoding="utf-8").partition(f"<!-- table: {marker} -->\n")
    lines = below.split("\n\n", maxsplit=1)[0].splitlines()
    head, _, *rows = [
        [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")] for line in lines
    ]
    return [head, *rows]


def code_blocks(page: Path, marker: str) -> list[str]:
    """The contents of the code blocks that follow a comment `<!-- run: marker -->`, in order."""
    pattern = rf"<!-- run: {re.escape(marker)} -->\n```\w*\n(.*?)```"
    return re.findall(pattern, page.read_text(encoding="utf-8"), re.DOTALL)


def without_code(text: str) -> str:
    """The prose of a page."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """What a link into `page` may end with, by the rule that code hosts use for headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(page: Path) -> list[str]:
    """The relative links of a page."""
    targets = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8")))
    return [target for target in targets if "://" not in target]


def typed(page: Path) -> list[str]:
    """The plain code blocks of a page: what its reader types."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [block for language, block in blocks if not language]


def commands(page: Path) -> list[list[str]]:
    """The words behind every `stretto` in the page's plain code blocks and `make train ARGS=...`, line by line."""
    lines = [line for block in typed(page) for line in block.replace("\\\n", " ").splitlines()]
    direct = [shlex.split(line.partition("stretto ")[2]) for line in lines if "stretto " in line]
    text = page.read_text(encoding="utf-8")
    through_make = [shlex.split(args) for args in re.findall(r'make train ARGS="([^"]*)"', text)]
    return direct + [["train", "stdlib-gpt", *words] for words in through_make]
