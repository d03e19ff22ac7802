"""What a command does that trains nothing: stage by stage, how far each is, and how long it still takes."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from stretto.errors import MissingExtra
from stretto_lab.patience import Patience, clock

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

T = TypeVar("T")


class Stages:
    """Shows one stage after the other, for the length of a block: a panel on a terminal, plain lines elsewhere.

    A plain line comes at the beginning of each stage, and whenever there has been none for some seconds. The panel goes
    with the block.

    Args:
        title: What they are of.
        is_shown: Whether anything is; False on ranks other than 0.
    """

    def __init__(self, title: str, *, is_shown: bool = True) -> None:
        self._title = title
        self._is_shown = is_shown
        self._what = ""
        self._total = 0.0
        self._done = 0.0
        self._is_timed = False
        self._started = time.monotonic()
        self._live: Any = None
        self._patience: Patience | None = None

    def begin(self, what: str, count: int = 0, *, seconds: float = 0.0) -> None:
        """Begin a stage.

        Args:
            what: What is done.
            count: Of what `advance` will tell; 0 where nothing is known of the end.
            seconds: That it takes, where these end it.
        """
        self._what, self._done, self._started = what, 0.0, time.monotonic()
        self._total, self._is_timed = seconds or float(count), bool(seconds)
        if self._is_shown and self._live is None:
            print(what, flush=True)
            if self._patience is not None:
                self._patience.heard()

    def advance(self) -> None:
        """Hear that one more of the stage is done."""
        self._done += 1

    def through(self, what: str, items: Sequence[T]) -> Iterator[T]:
        """Yield items, the stage being all of them."""
        self.begin(what, len(items))
        yield from self.counted(items)

    def counted(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items of the stage that has begun, and count each when the next one is asked for."""
        for item in items:
            yield item
            self.advance()

    def close(self) -> None:
        """Show no more."""
        if self._patience is not None:
            self._patience.close()
        if self._live is not None:
            self._live.stop()

    def __enter__(self) -> Self:
        if self._is_shown:
            with suppress(MissingExtra):  # lines say the same
                self._live = live_panel(self, is_passing=True)
            self._patience = Patience(lambda: "" if self._live else self.line)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def line(self) -> str:
        """What is done, how far it is, how long it has taken, and how long it still takes."""
        return f"{self._what}: {self._state}" if self._what else ""

    @property
    def _state(self) -> str:
        taken = time.monotonic() - self._started
        if not self._total:
            return f"{clock(taken)} so far"
        if self._is_timed:
            return f"{clock(taken)} of about {clock(self._total)}"
        text = f"{self._done:g} of {self._total:g}, {clock(taken)} so far"
        if self._done:
            text += f", about {clock(taken / self._done * (self._total - self._done))} left"
        return text

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        """Draw the panel; rich calls this several times a second."""
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        done = time.monotonic() - self._started if self._is_timed else self._done
        share = min(1.0, done / self._total) if self._total else 0.0
        rows = Table.grid(expand=True)  # a bar does not end its line
        rows.add_row(ProgressBar(total=1.0, completed=share))
        rows.add_row(Text(self.line))
        width = max(1, options.max_width - len("^C"))
        yield Panel(rows, title=fitting(self._title, width), title_align="left", width=width)


def fitting(title: str, width: int) -> "Text":
    """Return as much of a panel's title as its frame has room for: with more, the frame would become wider."""
    from rich.text import Text

    text = Text(title)
    text.truncate(max(1, width - len("╭─  ─╮")), overflow="ellipsis")
    return text


def live_panel(drawn: Any, *, is_passing: bool) -> Any:
    """Return what draws a panel several times a second, or None where no terminal can draw again what it has drawn.

    Args:
        drawn: What rich draws.
        is_passing: Whether nothing of it stays on the screen.

    Raises:
        MissingExtra: rich is not installed.
    """
    if not sys.stdout.isatty():
        return None
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError as error:
        raise MissingExtra("rich", "cli", "the live display") from error
    console = Console()
    if console.is_dumb_terminal:
        return None
    live = Live(drawn, console=console, refresh_per_second=4, transient=is_passing)
    live.start()
    return live
