"""Replicas that step with the same gradient: copies of each other, until something parts them.

Note [Reunion]
    Rank r has stepped with what it holds of the reduced gradient, and its masters are θ_r. All ranks tell each other a
    digest of θ_r and whether it is finite:

        all digests are equal       nothing is sent; the mean of equal values is that value, which a sum of M
                                    products with fl(1/M) is not, to the bit, for an M that is no power of two
        H ranks are finite          θ_r ← Σ_q finite fl(θ_q · fl(1/H))    on every rank, the others included
        no rank is                  `NonFinite` on all ranks

    A replica that is left out has lost its optimizer's state too, so then the state is averaged whatever is asked.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from stretto.checksums import digest
from stretto.engine.gain import Gain, stepped
from stretto.engine.replicas import Replica, Replicas
from stretto.errors import NonFinite, StateCorrupt
from stretto.exchange import Exchange
from stretto.flat import GradientBuffer
from stretto.optimizer import Hyperparameters, ReducedGradient, ShardedOptimizer, piece_states
from stretto.strategies.contract import Average, Divergence

_STANDING = np.dtype([("digest", "<u8"), ("is_finite", "?"), ("gradient_norm", "<f8")])
_SEED = 0
"""Of the coordinates at which replicas are compared with their mean."""


class Copies:
    """One rank's replica among others that should be the same.

    Args:
        exchange: Of the job.
        owner: Of this rank's masters, all of them.
    """

    def __init__(self, exchange: Exchange, owner: ShardedOptimizer) -> None:
        self.rounds = 0
        """Since the last average."""
        self.interval: int | None = None
        """Updates from one average to the next, where the strategy chooses."""
        self.are_equal = True
        """Whether masters and state were the same on all ranks when ranks last looked."""
        self.states_are_equal = True
        """As far as the last average went."""
        self._gains = [Gain() for _ in owner.optimizer.param_groups]
        """By parameter group."""
        self._gradient_norm = 0.0
        """2-norm of the mean gradient that this rank has stepped with last."""
        self._exchange = exchange
        self._owner = owner
        self._replicas = Replicas(exchange, owner)

    def begin_again(self) -> None:
        """Take the present masters, alike on all ranks, for the last average."""
        self.rounds, self.interval = 0, None
        self._gains = [Gain() for _ in self._gains]
        self._replicas.begin_again()

    def counts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps for every rank, beside the replicas."""
        return {
            "rounds": self.rounds,
            "interval": self.interval,
            "gains": self._gains,
            "gradient_norm": self._gradient_norm,
        }

    def take_up(self, counts: dict[str, Any]) -> None:
        """Go on from `counts`."""
        self.rounds, self.interval = counts["rounds"], counts["interval"]
        self._gains, self._gradient_norm = counts["gains"], counts["gradient_norm"]

    def write(self) -> Replica:
        """Return this rank's replica; it refers to the job's own tensors."""
        return self._replicas.write()

    def adopt(self, replica: Replica) -> None:
        """Put a written replica in the place of this rank's."""
        self._replicas.adopt(replica)

    def stepped(self, gradient: ReducedGradient, hyperparameters: Hyperparameters) -> None:
        """Take note of one step."""
        self._gradient_norm = self._norm(gradient)
        stepped(self._gains, hyperparameters)

    def reunite(self, effect: Average, flats: Sequence[Tensor] | None, step: int) -> Divergence | None:
        """Average the replicas; all ranks must call.

        Args:
            effect: What the strategy asks for.
            flats: One tensor per flat set; left with the average. None: the average is not to be shown.
            step: The update that this follows, for messages.

        Raises:
            NonFinite: No replica is finite.
            StateCorrupt: The average is not finite, although all that went into it is.
        """
        where = f"rank {self._exchange.rank}, step {step}"
        call = self._meet(state=effect.state, gradient_norm=self._gradient_norm)
        finite = np.flatnonzero(call["is_finite"]).tolist()
        if not finite:
            raise NonFinite(
                f"{where}: no replica is finite any more: expected one at least, whose values the others could take; "
                "go on from the last checkpoint, and average more often or lower the learning rate"
            )
        coordinates = self._coordinates(effect.probe)
        before = self._at(coordinates)
        if not _alike(call) or len(finite) < len(call):
            self._unite(call, self._scratch if flats is None else flats, state=effect.state)
            if not all(bool(master.isfinite().all()) for master in self._owner.masters):
                raise StateCorrupt(
                    f"{where}: the average of finite replicas is not finite: damaged on its way; "
                    "Options(verified=True) sends again what is damaged",
                    ranks=[self._exchange.rank],
                )
        divergence = self._divergence(call, finite, coordinates, before) if effect.probe else None
        for gain in self._gains:
            gain.average(state=effect.state)
        self._replicas.begin_again()
        self.rounds, self.states_are_equal = 0, effect.state
        if flats is not None:
            self._owner.publish(flats)
        return divergence

    def show(self, flats: Sequence[Tensor]) -> None:
        """Fill `flats` with the mean of all replicas, which stay as they are; all ranks must call."""
        call = self._meet(state=False)
        if _alike(call):
            self._owner.publish(flats)
        else:
            self._replicas.show_mean(self._share(call), flats)

    def consensus(self) -> ShardedOptimizer:
        """Return the owner, or where replicas differ a copy that holds their mean; all ranks must call."""
        call = self._meet(state=True)
        self.are_equal = _alike(call)
        return self._owner if self.are_equal else self._replicas.consensus(self._share(call))

    @functools.cached_property
    def _scratch(self) -> list[Tensor]:
        """For averages beside the gradients of an update, whose buffer is filling."""
        return GradientBuffer(self._owner.layout).flats

    def _meet(self, *, state: bool, gradient_norm: float = 0.0) -> NDArray[np.void]:
        """Return all ranks' standings."""
        values = list(self._values(state=state))
        own = np.zeros(1, _STANDING)
        own["digest"] = xxhash.xxh3_64_intdigest(
            np.array([digest(value) for value in values], "<u8").tobytes()
        )
        # The state too, whether or not it is averaged: a replica with nan there is lost at its next step.
        whole = values if state else self._values(state=True)
        own["is_finite"] = all(bool(value.isfinite().all()) for value in whole)
        own["gradient_norm"] = gradient_norm
        return np.frombuffer(b"".join(self._exchange.gather_bytes(own.tobytes())), _STANDING)

    def _values(self, *, state: bool) -> Iterator[Tensor]:
        yield from self._owner.masters
        for _, entries in piece_states(self._owner) if state else ():
            for _, value in sorted(entries.items()):
                yield value if isinstance(value, Tensor) else torch.tensor(value)

    def _norm(self, gradient: ReducedGradient) -> float:
        """Without the padding between parameters: it is no coordinate, and damage may have left anything there."""
        runs = (self._owner.values(gradient.sums, piece) for piece in self._owner.pieces)
        return math.sqrt(sum(float(run.norm()) ** 2 for run in runs))

    def _share(self, call: NDArray[np.void]) -> float:
        is_finite = call["is_finite"]
        return 1 / int(is_finite.sum()) if is_finite[self._exchange.rank] else 0.0

    def _unite(self, call: NDArray[np.void], flats: Sequence[Tensor], *, state: bool) -> None:
        share = self._share(call)
        if not share:
            self._owner.optimizer.state.clear()
        self._replicas.unite(share, flats, state=state or not call["is_finite"].all())

    def _coordinates(self, probe: int) -> list[tuple[int, Tensor]]:
        """Return, by bucket, the places of `probe` coordinates drawn with replacement; of all, if there are fewer."""
        pieces = self._owner.pieces
        ends = torch.tensor([piece.numel for piece in pieces]).cumsum(0)
        numel = int(ends[-1])
        generator = torch.Generator().manual_seed(_SEED)
        drawn = torch.arange(numel) if probe >= numel else torch.randint(numel, (probe,), generator=generator)
        found: dict[int, list[Tensor]] = {}
        owners = torch.bucketize(drawn, ends, right=True)
        for index in owners.unique().tolist():
            piece = pieces[index]
            places = drawn[owners == index] - (int(ends[index]) - piece.numel) + piece.start
            found.setdefault(piece.bucket, []).append(places)
        device = self._owner.masters[0].device
        return [(bucket, torch.cat(places).to(device)) for bucket, places in sorted(found.items())]

    def _at(self, coordinates: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
        return [self._owner.masters[bucket][places] for bucket, places in coordinates]

    def _divergence(
        self,
        call: NDArray[np.void],
        finite: Sequence[int],
        coordinates: Sequence[tuple[int, Tensor]],
        before: Sequence[Tensor],
    ) -> Divergence:
        squares = [
            float((now - then).double().square().sum())
            for now, then in zip(self._at(coordinates), before, strict=True)
        ]
        own = np.array([math.sqrt(sum(squares))])
        distances = np.frombuffer(b"".join(self._exchange.gather_bytes(own.tobytes())))
        return Divergence(
            distances=tuple(distances[finite].tolist()),
            gradient_norms=tuple(call["gradient_norm"][finite].tolist()),
            probe=sum(places.numel() for _, places in coordinates),
            numel=sum(slot.numel for slot in self._owner.layout.slots),
            gain=self._gain(),
        )

    def _gain(self) -> float:
        """Return the mean over coordinates."""
        sizes = [0] * len(self._gains)
        for slot in self._owner.layout.slots:
            sizes[slot.group] += slot.numel
        return float(np.dot(sizes, [gain.parameter for gain in self._gains])) / sum(sizes)


def _alike(call: NDArray[np.void]) -> bool:
    return bool((call["digest"] == call["digest"][0]).all())
