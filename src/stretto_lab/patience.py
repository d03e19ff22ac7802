"""Nothing that takes long is silent: after some seconds a wait prints its reason, its progress and its remaining
time.

Nothing here imports PyTorch, whose import is itself waited for.
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
"""Of silence after which there is a line: less than half of what a person takes for a hang."""

COLUMNS = 80
"""Of the terminal that everything fits into."""


class Patience:
    """Prints a line whenever nothing has been heard for `SECONDS`, from its own thread, until it is closed.

    Args:
        line: Returns the line; an empty one is not printed. It is called on that thread.
        stream: Where it is printed; None is the standard output.
    """

    def __init__(self, line: Callable[[], str], stream: TextIO | None = None) -> None:
        self._line = line
        self._stream = stream
        self._heard = time.monotonic()
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="stretto-patience", daemon=True).start()

    def heard(self) -> None:
        """Hear that something has been printed."""
        self._heard = time.monotonic()

    def close(self) -> None:
        """Print no more."""
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
    """Return a block in which one thing is waited for of which nothing is known but how long it has taken.

    Args:
        what: Reason of the wait.
        stream: Where to print; None is the standard output.
    """
    started = time.monotonic()
    return closing(Patience(lambda: f"{what}: {clock(time.monotonic() - started)} so far", stream))


def clock(seconds: float) -> str:
    """Return minutes and seconds, and hours where there are any."""
    minutes, seconds = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def fold(text: str, *, indent: int = 0, stream: TextIO | None = None) -> str:
    """Return `text` in lines that fit into a terminal; unchanged for a file or a pipe, where a line is one event.

    Its own line ends stay, and words stay whole.

    Args:
        text: Any.
        indent: Spaces before the second and every other line that one line is folded into.
        stream: Where it will be printed; None is the standard output.
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
