"""The source files of the project, parsed: what the style tests look at."""

import ast
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)
LIBRARY, LAB = ROOT / "src" / "stretto", ROOT / "src" / "stretto_lab"


def package_files() -> list[Path]:
    """Every Python file of both packages."""
    return sorted(file for package in (LIBRARY, LAB) for file in package.rglob("*.py"))


def project_files() -> list[Path]:
    """Every Python file that people wrote, tests included."""
    folders = ("src", "tests", "examples", "experiments", "benchmarks", "website")
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


@cache
def parsed(file: Path) -> ast.Module:
    """The syntax tree of `file`."""
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def places(check: Callable[[ast.AST, Path], object], files: Iterable[Path]) -> list[str]:
    """Where a check finds something, and what stands there."""
    return [
        f"{place(file, node)}: {ast.unparse(node)}"
        for file in files
        for node in ast.walk(parsed(file))
        if check(node, file)
    ]


def place(file: Path, node: ast.AST | None = None) -> str:
    """`path:line`, relative to the root of the repository."""
    line = "" if node is None else f":{getattr(node, 'lineno', 1)}"
    return f"{file.relative_to(ROOT)}{line}"


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """The tree and all statements in it; `ast.walk` would look into every expression too."""
    left = [tree]
    while left:
        node = left.pop()
        left += [one for one in ast.iter_child_nodes(node) if isinstance(one, STATEMENTS)]
        yield node


def functions(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of `file`."""
    for node in statements(parsed(file)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
