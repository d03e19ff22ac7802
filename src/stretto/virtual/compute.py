"""The compute model: what every rank's work costs in virtual time."""

import dataclasses
from collections.abc import Mapping
from zlib import crc32

import numpy as np

from stretto.engine.runtime import Work
from stretto.errors import ConfigError

_PICOSECONDS_PER_NANOSECOND = 1000


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """What ranks' work costs; the same on all, but for those that are slower."""

    micro_batch_ns: int = 1_000_000
    """One forward and backward pass of one micro-batch: 1 ms, a unit to think in."""
    step_ns: int = 0
    """One optimizer step, whatever its size."""
    step_picoseconds_per_element: int = 0
    """What an optimizer step costs for every element that the rank owns."""
    preview_factor: float = 1.0
    """What a preview costs, in steps: it steps copies, which takes 1.5 to 2.8 times as long on CPUs."""
    slowness: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """Factor on all work of a rank, by rank; those left out have 1."""
    jitter: float = 0.0
    """Each piece of work costs up to this share more or less, drawn evenly from a stream of the cluster's seed."""

    def __post_init__(self) -> None:
        if min(self.micro_batch_ns, self.step_ns, self.step_picoseconds_per_element) < 0:
            raise ConfigError(f"costs cannot be negative, found {self}")
        if min([self.preview_factor, *self.slowness.values()]) < 0:
            raise ConfigError(f"factors on costs cannot be negative, found {self}")
        if not 0 <= self.jitter < 1:
            raise ConfigError(f"jitter is a share of at least 0 and below 1, found {self.jitter}")


def parse_slowness(text: str) -> dict[int, float]:
    """Read "3=2.5,7=1.2": factors on the work of ranks.

    Raises:
        ConfigError: Anything else.
    """
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    try:
        return {int(rank): float(factor) for rank, _, factor in pairs}
    except ValueError as error:
        raise ConfigError(f"cannot read {text!r}: expected RANK=FACTOR,... as 3=2.5,7=1.2") from error


class Costs:
    """What one rank's work costs, piece by piece.

    Every kind of work draws its jitter from a stream of its own, so that the order in which a rank's lane and
    program come to their turns changes no cost.
    """

    def __init__(self, compute: Compute, seed: int, rank: int) -> None:
        self._compute = compute
        self._slowness = compute.slowness.get(rank, 1.0)
        self._seed = (seed, rank)
        self._streams: dict[Work, np.random.Generator] = {}

    def of(self, work: Work, elements: int) -> int:
        """Return what the next piece of `work` costs, in nanoseconds.

        Args:
            work: Its kind.
            elements: How many of them a step or a preview goes over.
        """
        compute = self._compute
        if work == "micro-batch":
            cost: float = compute.micro_batch_ns
        else:
            per_element = elements * compute.step_picoseconds_per_element // _PICOSECONDS_PER_NANOSECOND
            cost = compute.step_ns + per_element
            if work == "preview":
                cost *= compute.preview_factor
        if compute.jitter:
            cost *= 1 + compute.jitter * self._stream(work).uniform(-1, 1)
        return round(cost * self._slowness)

    def _stream(self, work: Work) -> np.random.Generator:
        if work not in self._streams:
            self._streams[work] = np.random.default_rng([*self._seed, crc32(work.encode())])
        return self._streams[work]
