"""Estimates of the noise on reduced gradients: its variance, and the norm of the gradient without it.

Note [Signal and noise]
    In one update rank r sends G_r. Everyone should get S = Σ_q G_q, of weight W, and rank r holds S + E_r. Over the T
    updates since the last average, of M ranks, and at p of the d coordinates:

        signal      1/T · Σ_t Σ_r <G_r, S + E_r> / W²
        y_r         Σ_t (S + E_r) / W                               at the p coordinates
        variance    1/T · Σ_r ‖y_r - ȳ‖² / ((M - 1)·p)

    What a rank has sent knows nothing of the noise on what it gets. So the signal is ‖S / W‖² in the mean, with an
    error of σ · √Σ‖G_r‖² / W in one update: σ · ‖S / W‖ / √M where all ranks send the same. It does not grow with d.
    ‖S + E_r‖² / W² contains d·σ², which at a million coordinates is thousands of times the signal. Nor does it matter
    whether values are damaged on their way, at their arrival or in memory.

    It is the variance of gradients, before any optimizer, so the estimate needs no knowledge of the optimizer. It is
    not the variance of replicas: if replicas differ although their gradients do not, they were damaged elsewhere.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.optimizer import ShardedOptimizer

# Seed of the coordinates.
_SEED = 0
# Elements that are multiplied at a time in float64: few enough for a CPU's cache, and enough to keep a device busy.
_CHUNK, _CHUNK_OF_DEVICES = 2**16, 2**22
UPDATES = 16
"""Fewest updates for a conclusion: the error of the signal is 1/√16 of the error in one update. A longer interval is
used alone."""


@dataclasses.dataclass(slots=True)
class Conclusion:
    """Signal and variance over the last updates: the last intervals that together have at least `UPDATES`."""

    intervals: list[tuple[int, float, float]] = dataclasses.field(default_factory=list)
    """Number of updates, sum of signals, and spread of each interval; the oldest first."""

    def add(self, updates: int, signal: float, spread: float) -> None:
        """Add an interval, and drop intervals that are no longer needed.

        Args:
            updates: Its length T.
            signal: Its T signals, added up.
            spread: Its variance, times T.
        """
        if not (updates and np.isfinite(signal) and np.isfinite(spread)):
            return
        self.intervals.append((updates, signal, spread))
        while sum(length for length, _, _ in self.intervals[1:]) >= UPDATES:
            del self.intervals[0]

    @property
    def signal(self) -> float:
        """Mean over updates of the squared 2-norm of the mean gradient without its noise; 0 before the first interval.

        An estimate, which may be below zero.
        """
        return self._mean(1)

    @property
    def variance(self) -> float:
        """Variance of the noise, per coordinate of the mean gradient; 0 before the first interval."""
        return self._mean(2)

    def _mean(self, part: int) -> float:
        updates = sum(interval[0] for interval in self.intervals)
        return sum(float(interval[part]) for interval in self.intervals) / updates if updates else 0.0


def spread_of(received: NDArray[np.floating[Any]]) -> float:
    """Return the variance over ranks of the received values, averaged over coordinates; NaN for fewer than two ranks.

    Args:
        received: y_r of Note [Signal and noise], `(ranks, p)`. Ranks with a value that is not finite are skipped.
    """
    sound = received[np.isfinite(received).all(axis=1)].astype(np.float64)
    return float(sound.var(axis=0, ddof=1).mean()) if len(sound) > 1 else float("nan")


def whole(products: NDArray[np.float64]) -> float:
    """Return the sum over ranks of <G_r, S + E_r>; a value that is not finite counts as the mean of the others."""
    sound = products[np.isfinite(products)]
    return float(sound.mean()) * len(products) if len(sound) else float("nan")


class GradientProbe:
    """Measures the gradients of one rank in every update, for Note [Signal and noise].

    It costs a pass over the sent and the received gradients, 8 bytes of memory per coordinate of the probe, and no
    message.

    Args:
        sharded: This rank's masters, complete.
        numel: Number of coordinates p, drawn once over all parameters, with replacement, the same on all ranks; all of
            them if a model has no more.
    """

    def __init__(self, sharded: ShardedOptimizer, numel: int) -> None:
        self._sharded = sharded
        self._places = _drawn(sharded, numel)
        self.numel = sum(places.numel() for _, places in self._places)
        """Number of coordinates p."""
        self.conclusion = Conclusion()
        """The conclusion, equal on all ranks."""
        self._sent: tuple[Tensor, Tensor, float] | None = None
        self._gradient_norm = torch.zeros(())
        self._begin()

    def _begin(self) -> None:
        """Drop the measurements since the last average."""
        self._updates = 0
        self._product = torch.zeros((), dtype=torch.float64, device=self._sharded.masters[0].device)
        self._received = [place.double().zero_() for place in self.at(self._sharded.masters)]

    @property
    def product(self) -> float:
        """Σ_t <G_r, S + E_r> / W² since the last average."""
        return float(self._product)

    @property
    def gradient_norm(self) -> float:
        """2-norm of the mean gradient of this rank alone, as last sent; 0 for a rank without weight."""
        return float(self._gradient_norm)

    @property
    def received(self) -> NDArray[np.float32]:
        """y_r since the last average, `(p,)`."""
        values: NDArray[np.float32] = torch.cat(self._received).float().numpy(force=True)
        return values

    def at(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the values of `tensors`, one per bucket, at the probe's coordinates, in one part for each bucket
        with coordinates.
        """
        return [tensors[bucket][places] for bucket, places in self._places]

    def sent(self, flats: Sequence[Tensor], sums: Sequence[Tensor], weight: float) -> None:
        """Measure a complete exchange; it counts once the optimizer steps with it.

        Args:
            flats: This rank's gradients, one tensor per flat set; without the errors that a wire sends again, which
                would count as signal.
            sums: What it has received, one tensor per bucket.
            weight: Weight of this rank's gradients.
        """
        product, squares = torch.zeros_like(self._product), torch.zeros_like(self._product)
        buckets = self._sharded.layout.buckets
        by_bucket = [flats[one.set_index].narrow(0, one.start, one.numel) for one in buckets]
        chunk = _CHUNK if self._product.device.type == "cpu" else _CHUNK_OF_DEVICES
        # Without the padding between parameters: it is no coordinate, and damage may have left anything there.
        for piece in self._sharded.pieces:
            own, total = (self._sharded.values(tensors, piece) for tensors in (by_bucket, sums))
            for left, right in zip(own.split(chunk), total.split(chunk), strict=True):
                factor = left.double()
                product += torch.dot(factor, right.double())
                squares += torch.dot(factor, factor)
        self._sent = product, squares, weight

    def stepped(self, sums: Sequence[Tensor], weight: float) -> None:
        """Count an update that steps with `sums` of this `weight`; the sums are not divided by it yet."""
        if self._sent is None:  # a checkpoint's exchange
            return
        (product, squares, own_weight), self._sent = self._sent, None
        self._product += product / weight**2
        self._gradient_norm = squares.sqrt() / own_weight if own_weight else torch.zeros(())
        for received, values in zip(self._received, self.at(sums), strict=True):
            received += values / weight
        self._updates += 1

    def conclude(self, products: NDArray[np.float64], received: NDArray[np.float32] | None) -> None:
        """End an interval, with the same arguments on all ranks.

        Args:
            products: `product` of all ranks.
            received: `received` of the ranks whose replicas are finite; None where all ranks hold the same.
        """
        spread = 0.0 if received is None else spread_of(received)
        self.conclusion.add(self._updates, whole(products), spread)
        self._begin()

    def begin_again(self) -> None:
        self.conclusion = Conclusion()
        self._begin()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's measurements, for a bit-identical continuation."""
        return {
            "intervals": list(self.conclusion.intervals),
            "updates": self._updates,
            "product": self.product,
            "gradient_norm": self.gradient_norm,
            "received": [part.clone() for part in self._received],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of `state_dict`; a probe of another size starts again."""
        if [len(part) for part in state["received"]] != [len(part) for part in self._received]:
            return
        self.conclusion = Conclusion(
            [(length, signal, spread) for length, signal, spread in state["intervals"]]
        )
        self._updates = state["updates"]
        self._gradient_norm = torch.tensor(state["gradient_norm"], dtype=torch.float64)
        self._product.fill_(state["product"])
        for own, saved in zip(self._received, state["received"], strict=True):
            own.copy_(saved)


def _drawn(sharded: ShardedOptimizer, probe: int) -> list[tuple[int, Tensor]]:
    """Return, by bucket, the places of `probe` coordinates drawn with replacement; of all coordinates if there are
    fewer.
    """
    pieces = sharded.pieces
    numel = sum(piece.numel for piece in pieces)
    ends = torch.tensor([piece.numel for piece in pieces]).cumsum(0)
    generator = torch.Generator().manual_seed(_SEED)
    drawn = torch.arange(numel) if probe >= numel else torch.randint(numel, (probe,), generator=generator)
    found: dict[int, list[Tensor]] = {}
    owners = torch.bucketize(drawn, ends, right=True)
    for index in owners.unique().tolist():
        piece = pieces[index]
        places = drawn[owners == index] - (int(ends[index]) - piece.numel) + piece.start
        found.setdefault(piece.bucket, []).append(places)
    device = sharded.masters[0].device
    return [(bucket, torch.cat(places).to(device)) for bucket, places in sorted(found.items())]
