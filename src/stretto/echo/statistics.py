"""Statistics of the input, per update: fresh and echoed batches, waits for the loader, losses at the first use.

At its first use a batch is data that the model has not seen since the last epoch, and its loss is unbiased. The
training loss over all uses is biased low. If the two move apart and the first one stops falling, batches are used too
often.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from stretto.echo.loader import EchoLoader
from stretto.records import Update


class InputStatistics:
    """Takes batches from a loader for a training loop, and counts until the next update.

    Args:
        now: Returns the time in seconds, on the clock of the waits.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._echo: EchoLoader[Any] | None = None
        self._use = 0  # of the batch in hand
        self._uses: list[int] = []
        self._wait_seconds = 0.0
        self._first_losses: list[tuple[Tensor, float]] = []

    def begin(self, loader: Iterable[Any]) -> None:
        """Say which loader the batches come from."""
        self._echo = loader if isinstance(loader, EchoLoader) else None

    def take(self, batches: Iterator[Any], nothing: object) -> tuple[Any, int]:
        """Return the next of `batches`, or `nothing` after the last one, and which use of it that is."""
        waited = 0.0 if self._echo is None else self._echo.wait_seconds
        started = self._now()
        batch = next(batches, nothing)
        # An EchoLoader knows how long it waited; the rest of its time went into `place` and `transform`.
        self._wait_seconds += (
            self._now() - started if self._echo is None else self._echo.wait_seconds - waited
        )
        return batch, 1 if self._echo is None else self._echo.use_index

    def begin_batch(self, use: int) -> None:
        """Count a batch that is handed out now; `use` is what `take` said of it."""
        self._use = use
        self._uses.append(use)

    def note_loss(self, loss: Tensor, weight: float) -> None:
        """Keep the loss of the batch in hand if this was its first use; its value is read at the update."""
        if self._echo is not None and self._use == 1 and weight > 0:
            self._first_losses.append((loss.detach(), weight))

    def fill(self, update: Update) -> Update:
        """Return `update` with the statistics since the update before it, and begin again."""
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
