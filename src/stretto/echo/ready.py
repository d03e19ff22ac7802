"""Reactive reuse: a fresh batch if one is ready, otherwise the least used of the last few.

The device never waits, and the loader never does either, whatever their speeds and their jitter. Which batch is used
when depends on time; a decision trace makes such a run repeatable (`Replay`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stretto.echo.chooser import HeldT, Memoryless
from stretto.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Ready:
    """Take a fresh batch if one is ready, otherwise the least used of the last `pool`."""

    pool: int = 12
    """Batches kept for echoes, and so the memory this costs. One batch alone would be used unevenly: with a loader of
    irregular speed some batches many times, others once. What leaves the pool before `max_uses` is lost to a long
    pause: with 8, eight ranks waited 3 % of the time for loaders 2.5 times as slow as a step, with 12 hardly ever."""
    max_uses: int = 4
    """Uses of a batch at most: where all in the pool have had theirs, the device waits after all. Four passes over
    the same data are about as good as fresh ones; many more are not."""

    def __post_init__(self) -> None:
        if self.pool < 1 or self.max_uses < 1:
            raise ConfigError(f"pool and max_uses must be at least 1, found {self.pool} and {self.max_uses}")

    @property
    def is_planned(self) -> bool:
        """No: the loader's speed decides."""
        return False

    def chooser(self, seed: int) -> "ReadyChooser":
        """See `Plan.chooser`; there is nothing to draw."""
        return ReadyChooser(self.max_uses)


class ReadyChooser(Memoryless):
    """Looks at the loader and at the uses so far."""

    def __init__(self, max_uses: int) -> None:
        self._max_uses = max_uses

    def choose(self, step: int, held: Sequence[HeldT], is_ready: Callable[[], bool]) -> HeldT | None:
        """See `Chooser.choose`."""
        if is_ready():
            return None
        least = least_used(held)
        return least if least.uses < self._max_uses else None


def least_used(held: Sequence[HeldT]) -> HeldT:
    """Return the batch with the fewest uses, the oldest of several."""
    return min(held, key=lambda one: (one.uses, one.number))
