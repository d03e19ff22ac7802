"""Long waits print their reason, progress and remaining time.

Nothing here imports PyTorch, whose import is itself a long wait.
"""

import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TextIO

SECONDS = 4.0
"""Seconds of silence before a line: less than half the time after which a person suspects a hang."""

COLUMNS = 80
"""Width of the terminal for all output."""


class Patience:
    """A thread that prints a line after every `SECONDS` of silence, until it is closed.

    Args:
        line: Returns the line; an empty line is not printed. It is called on that thread.
        stream: Where to print; None is the standard output.
    """

    def __init__(self, line: Callable[[], str], stream: TextIO | None = None) -> None:
        self._line = line
        self._stream = stream
        self._heard = time.monotonic()
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="stretto-patience", daemon=True).start()

    def heard(self) -> None:
        """Note that something has been printed."""
        self._heard = time.monotonic()

    def close(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(self._left()):
            if self._left() <= 0:
                self.heard()
                if line := self._line():
                    with suppress(BrokenPipeError):  # who waits meets it, and tells it in one line
                        print(fold(line, stream=self._stream), file=self._stream, flush=True)

    def _left(self) -> float:
        return max(0.0, self._heard + SECONDS - time.monotonic())


def waiting(what: str, stream: TextIO | None = None) -> closing[Patience]:
    """Return a block for a wait whose progress is unknown: the line shows how long it has lasted.

    Args:
        what: Reason of the wait.
        stream: Where to print; None is the standard output.
    """
    started = time.monotonic()
    return closing(Patience(lambda: f"{what}: {clock(time.monotonic() - started)} so far", stream))


def clock(seconds: float) -> str:
    """Return minutes and seconds, and hours if there are any."""
    minutes, seconds = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def fold(text: str, *, indent: int = 0, stream: TextIO | None = None) -> str:
    """Return `text` in lines that fit into a terminal; unchanged for a file or a pipe, where a line is one event.

    Line ends in it stay, and words are not broken.

    Args:
        text: Any text.
        indent: Number of spaces before each continued line.
        stream: Where the caller will print it; None is the standard output.
    """
    if not (stream or sys.stdout).isatty():
        return text
    width = min(COLUMNS, shutil.get_terminal_size().columns)
    return "\n".join(
        textwrap.fill(
            line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
        )
        for line in text.split("\n")
    )
