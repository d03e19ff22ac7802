"""Replicas that step with the same gradient: equal, until damage that nobody sees lets one drift away.

Note [Reunion]
    Rank r has stepped with what it holds of the reduced gradient, and its masters are θ_r. All ranks tell each other a
    digest of θ_r and whether it is finite:

        all digests are equal       nothing is sent; the mean of equal values is that value, which a sum of M
                                    products with fl(1/M) is not, to the bit, for an M that is no power of two
        H ranks are finite          θ_r ← Σ_q finite fl(θ_q · fl(1/H))    on every rank, the others included
        no rank is                  `NonFinite` on all ranks

    A replica that is left out has lost its optimizer's state too, so then the state is averaged whatever is asked.

Note [Gain]
    Gradients of one coordinate arrive with independent noise ε of variance 1. What it makes of the velocity is u, and
    of the parameter x:

        u ← β·u + ε
        x ← x - η·u

    E u², E u·x and E x² follow from one step to the next. An average takes x away, and u where it takes the state too.
    Without momentum E x² is Σ η². Adam, which divides by what it has seen, is not described; its β counts as none. Nor
    is an optimizer without a learning rate; its η counts as 1.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from stretto.averaging.mean import ReplicaMean
from stretto.checksums import digest
from stretto.engine.accumulation import GradientBuffer
from stretto.engine.replica import Flight, Performer, Replica
from stretto.engine.report import Vote
from stretto.engine.round import Reduction, Round
from stretto.engine.statistics import Buffer, Statistics
from stretto.errors import NonFinite, StateCorrupt
from stretto.exchange import Exchange
from stretto.optimizer import ReducedGradient, ShardedOptimizer, piece_states
from stretto.strategies.contract import Average, Divergence, Look, Moment, Postpone, Step

_CONDITION = np.dtype([("digest", "<u8"), ("is_finite", "?"), ("gradient_norm", "<f8")])
_SEED = 0
"""Of the coordinates at which replicas are compared with their mean."""


@dataclasses.dataclass(slots=True)
class Gain:
    """E u², E u·x and E x² of one coordinate."""

    velocity: float = 0.0
    mixed: float = 0.0
    parameter: float = 0.0

    def step(self, rate: float, momentum: float) -> None:
        """Follow one step."""
        self.velocity = momentum**2 * self.velocity + 1.0
        mixed = momentum * self.mixed
        self.parameter += rate**2 * self.velocity - 2 * rate * mixed
        self.mixed = mixed - rate * self.velocity

    def average(self, *, state: bool) -> None:
        """Follow an average."""
        self.mixed = self.parameter = 0.0
        if state:
            self.velocity = 0.0


class DriftingReplica(Replica):
    """One rank's replica among others that should be the same.

    Args are those of `Replica`; all ranks own everything.
    """

    may_differ = True

    def __init__(self, exchange: Exchange, sharded: ShardedOptimizer, **others: Any) -> None:
        super().__init__(exchange, sharded, **others)
        self.interval = None
        self.keeps_states_equal = True
        """As far as the last average went."""
        self._mean = ReplicaMean(exchange, sharded)
        self._rounds = 0
        self._are_equal = True
        self._is_ahead = False
        """Whether masters have been averaged that the model does not show yet."""
        self._gains = [Gain() for _ in sharded.optimizer.param_groups]
        """By parameter group."""
        self._gradient_norm = 0.0
        """2-norm of the mean gradient that this rank has stepped with last."""

    @property
    def performers(self) -> Mapping[type, Performer]:
        """Performers by effect; a `Step` is followed closely."""
        return {
            **super().performers,
            Look: self._look,
            Average: self._average,
            Postpone: self._postpone,
            Step: self._step,
        }

    @property
    def gap(self) -> int:
        """Rounds since the last average."""
        return self._rounds

    @property
    def has_drifted(self) -> bool:
        """Whether the model may show something else than other ranks' models."""
        return self._rounds > 0 or self._is_ahead

    @property
    def are_equal(self) -> bool:
        """Whether masters and state were the same on all ranks when `agreed_optimizer` last looked."""
        return self._are_equal

    def reduce(self, round: Round) -> Reduction:
        """Exchange the gradients of `round`, and count it."""
        reduction = super().reduce(round)
        self._rounds += 1
        return reduction

    def gather_committed(self, flats: list[Tensor], statistics: Statistics) -> list[Buffer]:
        """Fill `flats` with the mean of all replicas, which stay as they are."""
        conditions = self._compare(state=False)
        if _alike(conditions):
            self.sharded.publish(flats)
        else:
            self._mean.show(self._share(conditions), flats)
        return statistics.agreed

    def agreed_optimizer(self, changed: bytes) -> ShardedOptimizer:
        """Return the optimizer, or where replicas differ a copy that holds their mean; all ranks must call."""
        conditions = self._compare(state=True)
        self._are_equal = _alike(conditions)
        if self._are_equal:
            return self.sharded
        share = self._share(conditions)
        return self._mean.consensus(share, share)

    def begin_again(self) -> None:
        """Take the present masters, alike on all ranks, for the last average."""
        self._rounds, self.interval, self._is_ahead = 0, None, False
        self._gains = [Gain() for _ in self._gains]
        self._mean.begin_again()

    def state_dict(self) -> dict[str, Any]:
        """Return counts, and this rank's replica where replicas differ; it refers to the job's own tensors."""
        counts = {
            "rounds": self._rounds,
            "interval": self.interval,
            "gains": [dataclasses.astuple(gain) for gain in self._gains],
            "gradient_norm": self._gradient_norm,
        }
        return {"counts": counts, **({} if self._are_equal else {"replica": self._mean.state_dict()})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        if "replica" in state:
            self._mean.load_state_dict(state["replica"])
        if "counts" in state:
            counts = state["counts"]
            self._rounds, self.interval = counts["rounds"], counts["interval"]
            self._gains = [Gain(*gain) for gain in counts["gains"]]
            self._gradient_norm = counts["gradient_norm"]

    # Performers

    def _look(self, _: Look, flight: Flight | None) -> Moment:
        drains = flight is not None and all(vote == Vote.DRAIN for vote in flight.reduction.report.votes)
        return Moment(self.progress.round_index, self._rounds, drains, self.interval)

    def _postpone(self, effect: Postpone, _: Flight | None) -> None:
        self.interval = effect.updates

    def _step(self, effect: Step, flight: Flight | None) -> None:
        self.step(effect, flight)
        self._is_ahead = False
        if self.progress.stepped and isinstance(effect.gradient, ReducedGradient):
            self._gradient_norm = self._norm(effect.gradient)
            for gain, group in zip(self._gains, self.progress.hyperparameters, strict=True):
                gain.step(float(group.get("lr", 1.0)), float(group.get("momentum", 0.0)))

    def _average(self, effect: Average, flight: Flight | None) -> Divergence | None:
        """Average the replicas; without a flight, while the model goes on showing what they were.

        Raises:
            NonFinite: No replica is finite.
            StateCorrupt: The average is not finite, although all that went into it is.
        """
        progress = self.progress
        where = f"rank {self.exchange.rank}, step {progress.step + progress.stepped}"
        conditions = self._compare(state=effect.state, gradient_norm=self._gradient_norm)
        finite = np.flatnonzero(conditions["is_finite"]).tolist()
        if not finite:
            raise NonFinite(
                f"{where}: no replica is finite any more: expected one at least, whose values the others could take; "
                "go on from the last checkpoint, and average more often or lower the learning rate"
            )
        coordinates = self._coordinates(effect.probe)
        before = self._at(coordinates)
        if not _alike(conditions) or len(finite) < len(conditions):
            self._unite(
                conditions, self._scratch if flight is None else flight.round.buffer.flats, state=effect.state
            )
            if not all(bool(master.isfinite().all()) for master in self.sharded.masters):
                raise StateCorrupt(
                    f"{where}: the average of finite replicas is not finite: damaged on its way; "
                    "Options(verified=True) sends again what is damaged",
                    ranks=[self.exchange.rank],
                )
        divergence = self._divergence(conditions, finite, coordinates, before) if effect.probe else None
        for gain in self._gains:
            gain.average(state=effect.state)
        self._mean.begin_again()
        self._rounds, self.keeps_states_equal = 0, effect.state
        if flight is None:
            self._is_ahead = True
        else:
            self.sharded.publish(flight.round.buffer.flats)
        return divergence

    # Comparing and uniting

    @functools.cached_property
    def _scratch(self) -> list[Tensor]:
        """For averages beside the gradients of an update, whose buffer is filling."""
        return GradientBuffer(self.sharded.layout).flats

    def _compare(self, *, state: bool, gradient_norm: float = 0.0) -> NDArray[np.void]:
        """Return the condition of all ranks' replicas, a record each."""
        values = list(self._values(state=state))
        own = np.zeros(1, _CONDITION)
        own["digest"] = xxhash.xxh3_64_intdigest(
            np.array([digest(value) for value in values], "<u8").tobytes()
        )
        # The state too, whether or not it is averaged: a replica with nan there is lost at its next step.
        whole = values if state else self._values(state=True)
        own["is_finite"] = all(bool(value.isfinite().all()) for value in whole)
        own["gradient_norm"] = gradient_norm
        return np.frombuffer(b"".join(self.exchange.gather_bytes(own.tobytes())), _CONDITION)

    def _values(self, *, state: bool) -> Iterator[Tensor]:
        yield from self.sharded.masters
        for _, entries in piece_states(self.sharded) if state else ():
            for _, value in sorted(entries.items()):
                yield value if isinstance(value, Tensor) else torch.tensor(value)

    def _norm(self, gradient: ReducedGradient) -> float:
        """Without the padding between parameters: it is no coordinate, and damage may have left anything there."""
        runs = (self.sharded.values(gradient.sums, piece) for piece in self.sharded.pieces)
        return math.hypot(*(float(torch.linalg.vector_norm(run, dtype=torch.float64)) for run in runs))

    def _share(self, conditions: NDArray[np.void]) -> float:
        is_finite = conditions["is_finite"]
        return 1 / int(is_finite.sum()) if is_finite[self.exchange.rank] else 0.0

    def _unite(self, conditions: NDArray[np.void], flats: Sequence[Tensor], *, state: bool) -> None:
        share = self._share(conditions)
        if not share:
            self.sharded.optimizer.state.clear()
        self._mean.unite(share, flats, state=state or not conditions["is_finite"].all())

    def _coordinates(self, probe: int) -> list[tuple[int, Tensor]]:
        """Return, by bucket, the places of `probe` coordinates drawn with replacement; of all, if there are fewer."""
        pieces = self.sharded.pieces
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
        device = self.sharded.masters[0].device
        return [(bucket, torch.cat(places).to(device)) for bucket, places in sorted(found.items())]

    def _at(self, coordinates: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
        return [self.sharded.masters[bucket][places] for bucket, places in coordinates]

    def _divergence(
        self,
        conditions: NDArray[np.void],
        finite: Sequence[int],
        coordinates: Sequence[tuple[int, Tensor]],
        before: Sequence[Tensor],
    ) -> Divergence:
        squares = [
            float((now - then).double().square().sum())
            for now, then in zip(self._at(coordinates), before, strict=True)
        ]
        own = np.array([math.sqrt(sum(squares))])
        distances = np.frombuffer(b"".join(self.exchange.gather_bytes(own.tobytes())))
        return Divergence(
            distances=tuple(distances[finite].tolist()),
            gradient_norms=tuple(conditions["gradient_norm"][finite].tolist()),
            probe=sum(places.numel() for _, places in coordinates),
            numel=sum(slot.numel for slot in self.sharded.layout.slots),
            gain=self._gain(),
        )

    def _gain(self) -> float:
        """Return the mean over coordinates; 0 if there are none."""
        sizes = [0] * len(self._gains)
        for slot in self.sharded.layout.slots:
            sizes[slot.group] += slot.numel
        return float(np.dot(sizes, [gain.parameter for gain in self._gains])) / max(1, sum(sizes))


def _alike(conditions: NDArray[np.void]) -> bool:
    return bool((conditions["digest"] == conditions["digest"][0]).all())
