"""The project may only become smaller: lines of code, without docstrings, comments, blank lines and imports."""

import ast

import pytest

from tests.style.source import ROOT

AT_MOST = {"src": 26_074, "tests": 32_985}
"""The library and the lab are one sum: what leaves one for the other is no smaller."""
SLACK = 400
"""Where a package has become smaller by this much, its number falls."""


def lines_of_code(text: str) -> int:
    """Count the lines that are neither blank nor a comment, nor part of a docstring or an import."""
    passed: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        parts = [node] if isinstance(node, ast.Import | ast.ImportFrom) else []
        for one in body if isinstance(body, list) else []:
            if (
                isinstance(one, ast.Expr)
                and isinstance(one.value, ast.Constant)
                and isinstance(one.value.value, str)
            ):
                parts.append(one)
        for part in parts:
            passed.update(range(part.lineno, (part.end_lineno or part.lineno) + 1))
    lines = enumerate(text.splitlines(), start=1)
    return sum(
        number not in passed and line.strip() != "" and line.lstrip()[0] != "#" for number, line in lines
    )


def test_a_line_of_code_is_none_that_a_reader_skips() -> None:
    text = '"""Says."""\nimport os\nfrom a import (\n    b,\n)\n\n# Why.\nX = 1\n"""Of X,\nexplained."""\n'
    text += 'def f():\n    """Do."""\n    return (\n        1\n    )\n'
    assert lines_of_code(text) == 5


@pytest.mark.parametrize("package", AT_MOST)
def test_a_package_is_no_larger_than_it_was(package: str) -> None:
    found = sum(lines_of_code(path.read_text()) for path in sorted((ROOT / package).rglob("*.py")))
    assert found <= AT_MOST[package], f"{package} has grown: {found} lines of code; what can go instead?"
    assert found > AT_MOST[package] - SLACK, f"{package} is smaller now: write {found + SLACK // 4} down"
