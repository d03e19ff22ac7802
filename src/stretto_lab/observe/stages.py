"""Progress of commands that do not train: the current stage, its finished part, and its remaining time."""

import time
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Self, TypeVar

from stretto_lab.patience import Patience, clock

T = TypeVar("T")


class Stages:
    """Shows one stage after the other during a block.

    It prints a line at the beginning of each stage, and after some seconds of silence.

    Args:
        is_shown: Whether to print; False on ranks other than 0.
    """

    def __init__(self, *, is_shown: bool = True) -> None:
        self._is_shown = is_shown
        self._what = ""
        self._total = 0
        self._done = 0.0
        self._started = time.monotonic()
        self._patience: Patience | None = None

    def begin(self, what: str, count: int = 0) -> None:
        """Begin a stage.

        Args:
            what: Name of the stage.
            count: Number of steps that `advance` will report; 0 if unknown.
        """
        self._what, self._done, self._started = what, 0.0, time.monotonic()
        self._total = count
        if self._is_shown:
            print(what, flush=True)
            if self._patience is not None:
                self._patience.heard()

    def advance(self) -> None:
        """Count one more step of the stage."""
        self._done += 1

    def through(self, what: str, items: Sequence[T]) -> Iterator[T]:
        """Yield items and count them; they are the whole stage."""
        self.begin(what, len(items))
        yield from self.counted(items)

    def counted(self, items: Iterable[T]) -> Iterator[T]:
        """Yield items of the current stage, and count each when the next item is requested."""
        for item in items:
            yield item
            self.advance()

    def close(self) -> None:
        """Print no more."""
        if self._patience is not None:
            self._patience.close()

    def __enter__(self) -> Self:
        if self._is_shown:
            self._patience = Patience(lambda: self.line)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def line(self) -> str:
        """The stage, its progress, its time so far, and its remaining time."""
        return f"{self._what}: {self._state}" if self._what else ""

    @property
    def _state(self) -> str:
        taken = time.monotonic() - self._started
        if not self._total:
            return f"{clock(taken)} so far"
        text = f"{self._done:g} of {self._total:g}, {clock(taken)} so far"
        if self._done:
            text += f", about {clock(taken / self._done * (self._total - self._done))} left"
        return text
