"""Printable text: it cannot control a terminal, even if a model, another rank or a file name tries to.

It also checks whether the output still has a reader.
"""

import os
import select
import sys
import unicodedata

_STEERING = {"Cc", "Cf", "Cs"}
"""Unicode categories of control and format characters: escape sequences, carriage returns, changes of direction."""


def printable(text: str) -> str:
    """Return `text` with its control characters written as escapes; line ends and tabs stay."""
    return "".join(
        letter if letter in "\n\t" or unicodedata.category(letter) not in _STEERING else _escape(letter)
        for letter in text
    )


def _escape(letter: str) -> str:
    return letter.encode("unicode_escape", "surrogatepass").decode("ascii")


def is_unread() -> bool:
    """Return whether the reader of the standard output is gone: a pipe's reader has ended, a terminal was closed."""
    try:
        descriptor = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):  # no file: it was captured, or there is none
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))  # errors and hang-ups alone are reported, as nothing was asked for


def print_to_nobody() -> None:
    """Discard the standard output's buffer, and all later output, without an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
