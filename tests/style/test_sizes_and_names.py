"""Functions stay small, and files are named after ideas."""

import ast

from tests.style.source import functions, package_files, parsed, place, project_files

FUNCTION_LINES_MAX = 60
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "manager", "misc", "core"}


def lines_without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    lines = function.end_lineno - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    docstring = function.body[0]
    return lines - (docstring.end_lineno - docstring.lineno + 1)


def test_no_function_is_longer_than_60_lines_without_its_docstring() -> None:
    sizes = {
        f"{place(file, function)} {function.name}": lines_without_docstring(function)
        for file in project_files()
        for function in functions(file)
    }
    assert {name: size for name, size in sizes.items() if size > FUNCTION_LINES_MAX} == {}


def test_no_file_or_folder_has_a_name_that_says_nothing() -> None:
    assert [
        place(file) for file in project_files() if BANNED_NAMES & set(file.with_suffix("").parts[-2:])
    ] == []


def test_every_module_of_the_package_opens_with_a_docstring() -> None:
    assert [place(file) for file in package_files() if ast.get_docstring(parsed(file)) is None] == []
