"""What a command does that trains nothing: stage by stage, how far each is, and how long it still takes."""

import time
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import Self, TypeVar

from stretto_lab.patience import Patience, clock

T = TypeVar("T")


class Stages:
    """Shows one stage after the other, for the length of a block.

    A line comes at the beginning of each stage, and whenever there has been none for some seconds.

    Args:
        is_shown: Whether anything is; False on ranks other than 0.
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
            count: Of the steps that `advance` reports; 0 if unknown.
        """
        self._what, self._done, self._started = what, 0.0, time.monotonic()
        self._total = count
        if self._is_shown:
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
