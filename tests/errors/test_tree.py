"""The tree of errors in the docstring of `stretto.errors` is the tree of the classes."""

import re
from collections.abc import Iterator

from stretto import errors


def tree_of(kind: type[BaseException], depth: int = 0) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Yield depth, name and the built-in bases of an error, and of those below it."""
    builtin = tuple(base.__name__ for base in kind.__bases__ if base.__module__ == "builtins")
    yield depth, kind.__name__, builtin if depth else ()
    for one in kind.__subclasses__():
        if one.__module__ == errors.__name__:
            yield from tree_of(one, depth + 1)


def written() -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Yield the same as the docstring shows it."""
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"( {4,})([A-Z]\w+)(?: \((\w+)\))?(?: {2,}|$)", line):
            yield len(found[1]) // 2 - 2, found[2], (found[3],) if found[3] else ()


def test_the_docstring_shows_every_error_below_the_one_it_is_a_kind_of() -> None:
    assert list(written()) == list(tree_of(errors.StrettoError))
