"""What one rank takes from its loader between two updates: fresh and echoed batches, waits, losses at first use.

The loss at a batch's first use is an unbiased look at data not seen since the last epoch; the training loss under an
echo is biased low. Where the two part and the first does not fall faster, batches are used too often.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from stretto.echo.loader import EchoLoader
from stretto.records import Update


class Intake:
    """Takes batches for a loop, and keeps count until the next update.

    Args:
        now: The clock of waits, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._echo: EchoLoader[Any] | None = None
        self._uses: list[int] = []
        self._wait_seconds = 0.0
        self._first_losses: list[tuple[Tensor, float]] = []

    def begin(self, loader: Iterable[Any]) -> None:
        """Take from `loader` from now on."""
        self._echo = loader if isinstance(loader, EchoLoader) else None

    def take(self, batches: Iterator[Any], nothing: object) -> Any:
        """Return the next batch, or `nothing`."""
        waited = 0.0 if self._echo is None else self._echo.wait_seconds
        started = self._now()
        batch = next(batches, nothing)
        # An echoed loader knows what it waited for; placing and transforming is no wait.
        self._wait_seconds += (
            self._now() - started if self._echo is None else self._echo.wait_seconds - waited
        )
        if batch is not nothing:
            self._uses.append(1 if self._echo is None else self._echo.use_index)
        return batch

    def note_loss(self, loss: Tensor, weight: float) -> None:
        """Take note of the loss of the batch taken last, if this was its first use; read only at the update."""
        if self._echo is not None and self._echo.is_fresh and weight > 0:
            self._first_losses.append((loss.detach(), weight))

    def fill(self, update: Update) -> Update:
        """Return `update` with what was taken since the last one, and begin to count anew."""
        fresh = sum(use == 1 for use in self._uses)
        filled = dataclasses.replace(
            update,
            fresh=fresh,
            echoed=len(self._uses) - fresh,
            uses=tuple(self._uses),
            first_use_loss=_weighted_mean(self._first_losses),
            wait_seconds=self._wait_seconds,
        )
        self._uses, self._wait_seconds, self._first_losses = [], 0.0, []
        return filled


def _weighted_mean(losses: list[tuple[Tensor, float]]) -> float:
    weight = sum(weight for _, weight in losses)
    return sum(float(loss) * weight for loss, weight in losses) / weight if losses else math.nan
