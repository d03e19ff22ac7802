"""Nothing that takes long is silent: whoever waits says after some seconds for what, how far it is, and how long still.

Nothing here imports PyTorch, whose import is itself waited for.
"""

import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress

SECONDS = 4.0
"""Of silence after which there is a line: less than half of what a person takes for a hang."""

COLUMNS = 80
"""Of the terminal that everything fits into."""


class Patience:
    """Prints a line whenever nothing has been heard for `SECONDS`, from a thread of its own, until it is closed.

    Args:
        line: Returns the line; an empty one is not printed. It is called on that thread.
    """

    def __init__(self, line: Callable[[], str]) -> None:
        self._line = line
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
                        print(fold(line), flush=True)

    def _left(self) -> float:
        return max(0.0, self._heard + SECONDS - time.monotonic())


def waiting(what: str) -> closing[Patience]:
    """Return a block in which one thing is waited for of which nothing is known but how long it has taken."""
    started = time.monotonic()
    return closing(Patience(lambda: f"{what}: {clock(time.monotonic() - started)} so far"))


def clock(seconds: float) -> str:
    """Return minutes and seconds, and hours where there are any."""
    minutes, seconds = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def fold(text: str) -> str:
    """Return `text` in lines that fit into a terminal; words, paths among them, stay whole."""
    return textwrap.fill(text, COLUMNS, break_long_words=False, break_on_hyphens=False)
