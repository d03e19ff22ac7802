"""PAFT: synchronous training whose replicas are averaged at intervals, against noise that no guard can attribute to
a rank.
"""

import dataclasses
import math
from typing import Literal

from stretto.errors import ConfigError
from stretto.fields import check_fields
from stretto.strategies.contract import (
    AllReduce,
    Average,
    Divergence,
    Look,
    Moment,
    Postpone,
    Script,
    Step,
    Strategy,
)


@dataclasses.dataclass(frozen=True, slots=True)
class PAFTSync(Strategy):
    """Trains as `ddp`; at every `interval`-th update all replicas are replaced by their mean.

        θ_r ← Opt_r(θ_r, g_r)                    g_r is Σg / Σw as rank r received it
        θ_r ← mean of all finite θ_q             every `interval` updates

    Equal replicas stay bit-identical, and only a digest is sent for them.

    Staleness: 0; with `overlap` a gradient is computed right before an average and applied after it.
    Traffic per update: as `ddp`, and, if replicas differ, 1 / interval of it again, exposed without `overlap`.
    Memory: as `ddp`; on the bf16 wire the last average too; with `overlap` one more gradient buffer.
    Equals synchronous when: no fault parts the replicas.
    Source: "Capturing and Mitigating Gradient Aggregation Errors for Fault-Tolerant Distributed Training", Algorithm 1.
    """

    interval: int = 10
    """Updates between two averages."""
    state: bool = False
    """Average the optimizer's moments too; otherwise each rank keeps its own moments."""
    overlap: bool = False
    """Overlap averages with the next gradients, which are computed at θ_r and applied to the mean."""

    name = "paft-sync"
    overlaps = False
    staleness = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.interval < 1:
            raise ConfigError(f"PAFTSync(interval={self.interval}): expected at least 1 update")

    def update(self) -> Script:
        """One synchronous step, and, where due, an average after it, or before it and overlapped with its gradients."""
        if self.overlap and (yield Look()).gap >= self.interval:
            yield Average(self.state)
        gradient = yield AllReduce()
        yield Step(gradient)
        moment = yield Look()
        if moment.is_finishing or (moment.gap >= self.interval and not self.overlap):
            yield Average(self.state)


@dataclasses.dataclass(frozen=True, slots=True)
class PAFTDyn(Strategy):
    """As `PAFTSync`, with an interval that every average chooses again: signal over noise.

        corrected    H  = √max(0, signal) / σ       both of gradients, `stretto.averaging.probe`
        paper        H  = mean_r ‖g_r‖ / d_r        g_r is the last gradient of rank r alone, d_r = ‖θ̄ - θ_r‖

    signal is the squared norm of the mean gradient without its noise, and σ² the variance of the noise per coordinate.
    d_r is measured at the probe's coordinates, p of d, and multiplied by √(d / p). H is rounded and clamped to
    [minimum, maximum], and the same on all ranks.

    Note [The two estimates]
        Noise of variance σ² per coordinate leaves E d_r² = (M - 1)/M · d · σ² · Σ η² under SGD: the paper's d_r grows
        with the interval that was chosen before, with the learning rate, and with √d. The corrected estimate does not
        depend on any of them, nor on the optimizer.

        The paper takes ‖g_r‖ of what a worker has computed (line 3), before noise enters (line 4). It does not define
        its subscripts p and s, nor how ranks reduce the ratios; we chose the probe and the mean. If replicas differ but
        the probe finds no noise, the interval is `first`, because their distance is unknown.

    Staleness, memory: those of `paft-sync`, and 8 bytes for each coordinate of the probe.
    Traffic: by the interval that is chosen; an average of replicas that differ sends 4 bytes more for each coordinate
    of the probe to every rank.
    Equals synchronous when: no fault parts the replicas.
    Source: the same paper, Algorithm 2, which always overlaps.
    """

    first: int = 10
    """Updates before the first average, and before the next one if replicas differ but the probe finds no noise."""
    minimum: int = 1
    """Shortest interval."""
    maximum: int = 100
    """Longest interval; also the interval while replicas are equal."""
    estimate: Literal["corrected", "paper"] = "corrected"
    """How the noise is estimated."""
    probe: int = 4096
    """Number of coordinates that are compared, drawn once over all parameters, with replacement, the same on all
    ranks; all of them if a model has no more."""
    state: bool = False
    """Average the optimizer's moments too; otherwise each rank keeps its own moments."""
    overlap: bool = False
    """Overlap averages with the next gradients, as in the paper; see `PAFTSync.overlap`."""

    name = "paft-dyn"
    overlaps = False
    staleness = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not 1 <= self.minimum <= self.maximum:
            raise ConfigError(
                f"PAFTDyn(minimum={self.minimum}, maximum={self.maximum}): expected 1 <= minimum <= maximum"
            )
        for field in ("first", "probe"):
            if getattr(self, field) < 1:
                raise ConfigError(f"PAFTDyn({field}={getattr(self, field)}): expected at least 1")

    def update(self) -> Script:
        """One synchronous step, and, where due, an average and a new interval."""
        if self.overlap and self._is_due((yield Look())):
            yield from self._average()
        gradient = yield AllReduce()
        yield Step(gradient)
        moment = yield Look()
        if moment.is_finishing or (self._is_due(moment) and not self.overlap):
            yield from self._average()

    def _is_due(self, moment: Moment) -> bool:
        return moment.gap >= (moment.interval or self.first)

    def _average(self) -> Script:
        divergence = yield Average(self.state, self.probe)
        yield Postpone(self.interval_after(divergence))

    def interval_after(self, divergence: Divergence) -> int:
        """Return the number of updates until the next average; if replicas are equal, the longest interval."""
        if divergence.are_equal:
            return self.maximum
        wanted = self._by_paper(divergence) if self.estimate == "paper" else self._by_gradients(divergence)
        return self.maximum if wanted >= self.maximum else max(self.minimum, round(wanted))

    def _by_paper(self, divergence: Divergence) -> float:
        pairs = list(zip(divergence.gradient_norms, divergence.distances, strict=True))
        if not all(distance > 0 for _, distance in pairs):
            return self.first
        return sum(norm / distance for norm, distance in pairs) / len(pairs)

    def _by_gradients(self, divergence: Divergence) -> float:
        if not divergence.variance > 0:
            return self.first
        return math.sqrt(max(0.0, divergence.signal) / divergence.variance)
