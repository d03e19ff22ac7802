"""A loader that takes time, to show the effect of a slow store or a slow decoder on a run.

30              wait until the micro-batch has taken 30 ms, as for a store that answers slowly
30,decode       decompress data for 30 ms of processor time
30,jitter=0.5   draw each duration from a gamma distribution with this coefficient of variation
"""

import re
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import numpy as np

from stretto.errors import ConfigError
from stretto.fields import check_fields
from stretto_lab.recipes import ResumableLoader

Batch = TypeVar("Batch")

_PACKED = zlib.compress(bytes(1 << 18))
"""Data to decompress: it takes a fraction of a millisecond without Python's lock, as decoders do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowStore:
    """The duration of loading a micro-batch, and whether it computes or waits."""

    milliseconds: float
    """Mean duration of a micro-batch's loading."""
    decodes: bool = False
    """Whether loading keeps a core busy; otherwise it only waits."""
    jitter: float = 0.0
    """Coefficient of variation of the duration."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.milliseconds < float("inf") or not 0 <= self.jitter < float("inf"):
            raise ConfigError(f"a slow loader needs a duration and a jitter of at least 0, found {self}")

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read "MS[,decode][,jitter=CV]", or "none".

        Raises:
            ConfigError: The text has another form.
        """
        if text == "none":
            return None
        match = re.fullmatch(r"([\d.]+)(,decode)?(?:,jitter=([\d.]+))?", text.replace(" ", ""))
        try:
            if match is None:
                raise ValueError("no such form")
            return cls(
                milliseconds=float(match[1]), decodes=match[2] is not None, jitter=float(match[3] or 0.0)
            )
        except ValueError as error:
            raise ConfigError(
                f"cannot read the slow loader {text!r}: expected MS[,decode][,jitter=CV], as 30,decode"
            ) from error

    def durations(self, seed: int) -> Iterator[float]:
        """Yield the seconds of each micro-batch."""
        generator = np.random.default_rng(seed)
        mean = self.milliseconds / 1000
        while True:
            # A gamma distribution of mean m and variation c has shape 1 / c^2 and scale m c^2.
            spread = self.jitter**2
            yield float(generator.gamma(1 / spread, mean * spread)) if spread else mean


class SlowLoader(Generic[Batch]):
    """Returns the micro-batches of `loader`, each after the time that `store` gives.

    Args:
        loader: The loader to slow down; its state is this loader's state.
        store: The duration of each micro-batch.
        seed: Seed of the jitter.
    """

    def __init__(self, loader: ResumableLoader[Batch], store: SlowStore, seed: int) -> None:
        self._loader = loader
        self._store = store
        self._durations = store.durations(seed)

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self._loader)
        while True:
            started = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            seconds = next(self._durations)
            if self._store.decodes:
                _keep_busy(seconds)
            else:
                time.sleep(max(0.0, seconds - (time.perf_counter() - started)))
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)


def _keep_busy(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        zlib.decompress(_PACKED)
