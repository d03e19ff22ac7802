"""What the source may not contain, where no linter looks."""

import ast
import re
from pathlib import Path

from tests.style.source import LAB, LIBRARY, package_files, place, places, project_files

ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
SUPPRESSION = re.compile(r"#\s*(noqa|type:\s*ignore)")
REASONED = re.compile(r"#\s*(noqa: [A-Z]+\d+|type: ignore\[[\w, -]+\])(, [A-Z]+\d+)*\s+[#(]\s*\w+")
UNFINISHED = re.compile(r"#.*\b(TODO|FIXME|XXX|HACK)\b")


def lines_matching(pattern: re.Pattern[str], *, but_not: re.Pattern[str] | None = None) -> list[str]:
    """`path:line: text` of every line of the project that matches."""
    return [
        f"{place(file)}:{number}: {line.strip()}"
        for file in project_files()
        if file != Path(__file__)
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.search(line) and not (but_not and but_not.search(line))
    ]


def touches_environment(node: ast.AST, file: Path) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and any(alias.name in ENVIRONMENT_NAMES for alias in node.names)
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and node.attr in ENVIRONMENT_NAMES
    )


def test_only_the_command_line_and_what_joins_a_launcher_touch_the_environment() -> None:
    joins = LIBRARY / "groups" / "launcher.py"
    files = [file for file in package_files() if not file.is_relative_to(LAB / "cli") and file != joins]
    assert places(touches_environment, files) == []


def test_every_silenced_check_names_its_rule_and_its_reason() -> None:
    assert lines_matching(SUPPRESSION, but_not=REASONED) == []


def test_nothing_is_left_for_later_in_a_comment() -> None:
    assert lines_matching(UNFINISHED) == []


def test_annotations_are_evaluated() -> None:
    assert lines_matching(re.compile("^from __future__ import annotations")) == []
