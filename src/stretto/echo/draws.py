"""Whether a loader draws random numbers on the reading thread: runs of one seed may then differ.

The generators of PyTorch, NumPy and Python belong to the process. If a data set without workers draws from them on the
reading thread, and the training loop draws from them too, chance decides the order.

A generator shows that some thread has drawn, but not which. While the caller waits for a batch, only the reading thread
runs, so a change then comes from that thread. A change in the first wait of a pass only raises suspicion: samplers draw
the order of the epoch then, always before the first step.
"""

import pickle
import random
import warnings
from collections.abc import Mapping

import numpy as np
import torch

from stretto.echo.reader import Fetched, Reader, ThreadReader

WAITS = 5
"""Number of waits after the first that are checked, once there is a suspicion."""
WAIT_SECONDS = 0.1
"""Longest extension of each of these waits, so that a read falls into it even if a batch was ready."""


class DrawWatch:
    """Checks the first waits for a loader, and warns once if the loader draws."""

    def __init__(self) -> None:
        self._waits_left = WAITS
        self._at_start: Mapping[str, bytes] | None = None
        """States before a pass; None once its first batch has been taken."""

    def begin(self) -> None:
        """Record the states before a pass reads anything."""
        self._at_start = _states() if self._waits_left else None

    def take(self, reader: Reader) -> Fetched:
        """Return the result of `reader.take()`. Only a thread other than the caller's can race for random numbers.

        Warns: RuntimeWarning: The loader drew random numbers during the wait.
        """
        if not self._waits_left or not (isinstance(reader, ThreadReader) and reader.has_thread):
            return reader.take()
        if self._at_start is not None:
            fetched = reader.take()
            self._waits_left = WAITS if _changed(self._at_start) else 0
            self._at_start = None
            return fetched
        before = _states()
        fetched = reader.take_and_wait(WAIT_SECONDS)
        drawn = _changed(before)
        self._waits_left = 0 if drawn else self._waits_left - 1
        if drawn:
            warnings.warn(
                f"the loader draws from the random state of {' and '.join(drawn)} on the reading thread; where the "
                "training loop draws from it too, runs of one seed differ: expected a loader with workers, a generator "
                "of the data set's own, or EchoOptions(ahead=0) with a plan other than Ready",
                RuntimeWarning,
                stacklevel=2,
            )
        return fetched


def _states() -> Mapping[str, bytes]:
    """Return the states of the process's generators, for comparison."""
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "NumPy": pickle.dumps(np.random.get_state(legacy=False)),
        "Python": pickle.dumps(random.getstate()),
    }


def _changed(before: Mapping[str, bytes]) -> list[str]:
    """Return the names of the generators whose state has changed."""
    return [name for name, state in _states().items() if state != before[name]]
