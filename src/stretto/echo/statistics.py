"""Statistics of the input, per update: fresh and echoed batches, waits for the loader, losses at the first use.

At its first use a batch is data that the model has not seen since the last epoch, and its loss is unbiased. The
training loss over all uses is biased low. If the two move apart and the first one stops falling, batches are used too
often.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor

from stretto.echo.loader import EchoLoader
from stretto.echo.updates import Updates
from stretto.records import Update

Batch = TypeVar("Batch")


class InputStatistics:
    """Takes batches from a loader for a training loop, and counts them until the next update.

    Args:
        now: Returns the time in seconds, on the clock of the waits.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self.echo: EchoLoader[Any] | None = None
        """The loader of the pass in progress, if it is an `EchoLoader`."""
        self.uses: list[int] = []
        """Use numbers of the batches returned since the last update; the caller that returns a batch appends its
        number."""
        self._last_use = 0  # of the batch in hand, where none was given out since
        self._mixed_before = 0
        self._wait_seconds = 0.0
        self._first_losses: list[tuple[Tensor, float]] = []

    def begin(self, loader: Iterable[Batch], updates: Updates) -> Iterator[Batch]:
        """Return an iterator over a pass of `loader`, whose batches go to `updates`."""
        self.echo = loader if isinstance(loader, EchoLoader) else None
        self._mixed_before = 0 if self.echo is None else self.echo.mixed_updates
        return iter(loader) if self.echo is None else self.echo.over(updates)

    def take(self, batches: Iterator[Any], nothing: object) -> tuple[Any, int]:
        """Return the next of `batches`, or `nothing` after the last one, and the number of its use."""
        waited = 0.0 if self.echo is None else self.echo.wait_seconds
        started = self._now()
        batch = next(batches, nothing)
        # An EchoLoader knows how long it waited; the rest of its time went into `place` and `transform`.
        self._wait_seconds += self._now() - started if self.echo is None else self.echo.wait_seconds - waited
        return batch, 1 if self.echo is None else self.echo.use_index

    def note(self, loss: Tensor | None, weight: float, samples: int) -> int:
        """Return how many of the samples of the current batch are used for the first time: all or none.

        Keep its loss too, if an `EchoLoader` gave it for the first time; its value is read at the update.
        """
        is_fresh = self.echo is None or (self.uses[-1] if self.uses else self._last_use) == 1
        if self.echo is not None and is_fresh and loss is not None and weight > 0:
            self._first_losses.append((loss.detach(), weight))
        return samples if is_fresh else 0

    def fill(self, update: Update) -> Update:
        """Return `update` with the statistics since the previous update, and start again."""
        fresh = self.uses.count(1)
        self._last_use = self.uses[-1] if self.uses else self._last_use
        mixed = 0 if self.echo is None else self.echo.mixed_updates
        losses, weight = self._first_losses, sum(weight for _, weight in self._first_losses)
        filled = dataclasses.replace(
            update,
            fresh=fresh,
            echoed=len(self.uses) - fresh,
            mixed=mixed - self._mixed_before,
            uses=tuple(self.uses),
            first_use_loss=sum(float(loss) * w for loss, w in losses) / weight if losses else math.nan,
            wait_seconds=self._wait_seconds,
        )
        self.uses, self._wait_seconds, self._first_losses, self._mixed_before = [], 0.0, [], mixed
        return filled


def num_samples(batch: object) -> int:
    """Return the length of the first tensor or array in a batch, or 1; it is only a record, so it never raises."""
    if type(batch) is Tensor:
        return int(batch.size(0)) if batch.dim() else 1
    try:
        for leaf in leaves_of(batch):
            if (length := _length(leaf)) is not None:
                return length
    except Exception:  # a batch may be any object, with any attributes
        return 1
    return 1


def leaves_of(batch: object) -> Iterator[object]:
    """Yield the items in the containers of a batch: tensors, arrays and any other objects."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(
        batch, Mapping | list | tuple
    ):  # before it is asked for attributes, which may be its keys
        for part in list(batch.values()) if isinstance(batch, Mapping) else batch:
            yield from leaves_of(part)
    elif dataclasses.is_dataclass(batch) and not isinstance(getattr(batch, "shape", None), tuple):
        for field in dataclasses.fields(batch):
            yield from leaves_of(getattr(batch, field.name))
    else:
        yield batch


def _length(leaf: Any) -> int | None:
    if isinstance(leaf, Tensor):
        return int(leaf.size(0)) if leaf.dim() else 1  # a nested one has no shape
    shape = getattr(leaf, "shape", None)
    if not isinstance(shape, tuple) or (shape and not isinstance(shape[0], int)):
        return None
    return shape[0] if shape else 1
