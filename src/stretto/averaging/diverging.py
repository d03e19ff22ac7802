"""Replicas that step with the same gradient: equal, until unseen damage lets one drift away.

Note [Reunion]
    Rank r has stepped with its copy of the reduced gradient, and its masters are θ_r. All ranks exchange a digest of
    θ_r and whether it is finite:

        all digests are equal       nothing is sent; the mean of equal values is that value, which a sum of M
                                    products with fl(1/M) is not, to the bit, for an M that is no power of two
        H ranks are finite          θ_r ← Σ_q finite fl(θ_q · fl(1/H))    on every rank, the others included
        no rank is                  `NonFinite` on all ranks

    A replica that is not finite has lost its optimizer's state too, so then ranks average the state in any case.
"""

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.averaging.mean import ReplicaMean
from stretto.averaging.probe import GradientProbe
from stretto.checksums import digest_of_all, on_host
from stretto.engine.accumulation import GradientBuffer
from stretto.engine.buffer_sync import BufferSync
from stretto.engine.buffers import Buffer
from stretto.engine.replica import Performer, Replica
from stretto.engine.replica_sync import SyncState
from stretto.engine.report import Vote
from stretto.engine.round import Round
from stretto.errors import NonFinite, StateCorrupt
from stretto.exchange import Exchange
from stretto.flat import Slices
from stretto.optimizer import ReducedGradient, ShardedOptimizer, piece_states
from stretto.strategies.contract import Average, Divergence, Look, Moment, Postpone, Step

_CONDITION = np.dtype([("digest", "<u8"), ("is_finite", "?"), ("product", "<f8")])


class DivergingReplica(Replica):
    """One rank's replica in a job where all replicas should be equal.

    Takes the arguments of `Replica`; all ranks own everything.

    Args:
        probe: Number of coordinates at which an average compares ranks; 0 compares none.
    """

    def __init__(self, exchange: Exchange, sharded: ShardedOptimizer, *, probe: int, **others: Any) -> None:
        super().__init__(exchange, sharded, **others)
        self.interval = None
        self._mean = ReplicaMean(exchange, sharded)
        # Whether all replicas were equal when `agreed_optimizer` last compared them.
        self._are_equal = True
        self._probe = GradientProbe(sharded, probe) if probe else None

    @property
    def performers(self) -> Mapping[type, Performer]:
        return {
            **super().performers,
            Look: self._look,
            Average: self._average,
            Postpone: self._postpone,
            Step: self._step,
        }

    def reduce(self, round: Round) -> None:
        """Exchange the gradients of `round`, and count it."""
        super().reduce(round)
        self.sync.diverge()

    def sum_up(self, round: Round) -> tuple[Slices, bool]:
        """Sum the gradients of `round` over ranks, and measure the sent gradients, which may be overwritten soon."""
        sums, is_stale = super().sum_up(round)
        if self._probe is not None:
            feedback, contribution = self.exchange.feedback, round.contribution
            flats = round.buffer.flats if feedback is None else feedback.given
            self._probe.sent(flats, sums, contribution.totals.weight)
        return sums, is_stale

    def gather_committed(self, flats: list[Tensor], buffer_sync: BufferSync) -> list[Buffer]:
        """Fill `flats` with the mean of all replicas, without changing them."""
        conditions = self._compare(state=False)
        if _alike(conditions):
            self.sharded.publish(flats)
        else:
            self._mean.show(self._share(conditions), flats)
        return buffer_sync.agreed

    def agreed_optimizer(self, changed: bytes) -> ShardedOptimizer:
        """Return the optimizer, or, if replicas differ, a copy with their mean; all ranks must call it."""
        conditions = self._compare(state=True)
        self._are_equal = _alike(conditions)
        if self._are_equal:
            return self.sharded
        share = self._share(conditions)
        return self._mean.consensus(share, share)

    def begin_again(self) -> None:
        """Use the current masters, equal on all ranks, as the last average."""
        self.sync.mark_synced()
        self.interval = None
        if self._probe is not None:
            self._probe.begin_again()
        self._mean.begin_again()

    def state_dict(self) -> dict[str, Any]:
        """Return counts, and this rank's replica if replicas differ; the tensors are the job's own."""
        counts = {
            "rounds": self.sync.gap,
            "interval": self.interval,
            "probe": None if self._probe is None else self._probe.state_dict(),
        }
        return {"counts": counts, **({} if self._are_equal else {"replica": self._mean.state_dict()})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the result of `state_dict`."""
        if "replica" in state:
            self._mean.load_state_dict(state["replica"])
        if "counts" in state:
            counts = state["counts"]
            gap, self.interval = counts["rounds"], counts["interval"]
            self.sync.resume(SyncState.DIVERGING if gap else SyncState.SYNCED, gap)
            if self._probe is not None and counts["probe"] is not None:
                self._probe.load_state_dict(counts["probe"])

    # Performers

    def _look(self, _: Look, round: Round | None) -> Moment:
        is_finishing = round is not None and set(round.report.votes) <= {
            Vote.PASS_LEFT,
            Vote.FINISHING,
        }
        return Moment(self.progress.round_index, self.sync.gap, is_finishing, self.interval)

    def _postpone(self, effect: Postpone, _: Round | None) -> None:
        self.interval = effect.updates

    def _step(self, effect: Step, round: Round) -> None:
        gradient = effect.gradient
        if self._probe is not None and isinstance(gradient, ReducedGradient) and gradient.weight > 0:
            self._probe.stepped(gradient.sums, gradient.weight)
        self.step(effect, round)

    def _average(self, effect: Average, round: Round | None) -> Divergence | None:
        """Average the replicas; without a round, while the model continues showing what they were.

        Raises:
            NonFinite: No replica is finite.
            StateCorrupt: The average is not finite, although all its inputs are.
        """
        progress = self.progress
        where = f"rank {self.exchange.rank}, step {progress.step + progress.stepped}"
        probe = self._probe if effect.probe else None
        conditions = self._compare(state=effect.state, product=0.0 if probe is None else probe.product)
        finite = np.flatnonzero(conditions["is_finite"]).tolist()
        if not finite:
            raise NonFinite(
                f"{where}: no replica is finite: expected at least one finite replica, which the others could "
                "copy; resume from the last checkpoint, and average more often or lower the learning rate"
            )
        before = [] if probe is None else probe.at(self.sharded.masters)
        if not _alike(conditions) or len(finite) < len(conditions):
            share = self._share(conditions)
            if not share:  # what it holds of a replica that is not finite need not be either
                self.sharded.optimizer.state.clear()
            flats = self._scratch if round is None else round.buffer.flats
            self._mean.unite(share, flats, state=effect.state or len(finite) < len(conditions))
            if not _are_finite(self.sharded.masters):
                raise StateCorrupt(
                    f"{where}: the average of finite replicas is not finite: the exchange damaged it; "
                    "Options(verified=True) sends damaged values again",
                    ranks=[self.exchange.rank],
                )
        divergence = None if probe is None else self._divergence(probe, conditions, before)
        progress.divergence = divergence
        self._mean.begin_again()
        self.sync.mark_synced(states=effect.state, is_shown=round is not None)
        if round is not None:
            self.publish_masters(round)
        return divergence

    # Comparing and uniting

    @functools.cached_property
    def _scratch(self) -> list[Tensor]:
        """Scratch memory for averages that overlap an update's gradients, whose buffer is in use."""
        return GradientBuffer(self.sharded.layout).flats

    def _compare(self, *, state: bool, product: float = 0.0) -> NDArray[np.void]:
        """Return the condition of all ranks' replicas, one record each."""
        values = list(self._values(state=state))
        own = np.zeros(1, _CONDITION)
        own["digest"] = digest_of_all(values)
        # The state too, whether or not it is averaged: a replica with nan there is lost at its next step.
        whole = values if state else list(self._values(state=True))
        own["is_finite"] = _are_finite(whole)
        own["product"] = product
        return np.frombuffer(b"".join(self.exchange.gather_bytes(own.tobytes())), _CONDITION)

    def _values(self, *, state: bool) -> Iterator[Tensor]:
        yield from self.sharded.masters
        for _, entries in piece_states(self.sharded) if state else ():
            for _, value in sorted(entries.items()):
                yield value if isinstance(value, Tensor) else torch.tensor(value)

    def _share(self, conditions: NDArray[np.void]) -> float:
        is_finite = conditions["is_finite"]
        return 1 / int(is_finite.sum()) if is_finite[self.exchange.rank] else 0.0

    def _divergence(
        self, probe: GradientProbe, conditions: NDArray[np.void], before: Sequence[Tensor]
    ) -> Divergence:
        """End an interval of the probe, and return its results; equal replicas send nothing for it."""
        if _alike(conditions):
            probe.conclude(conditions["product"], None)
            distances = gradient_norms = np.zeros(len(conditions))
        else:
            changed = zip(probe.at(self.sharded.masters), before, strict=True)
            squares = sum(
                torch.stack([(now - then).double().square().sum() for now, then in changed]).tolist()
            )
            probed = [("distance", "<f8"), ("gradient_norm", "<f8"), ("received", "<f4", (probe.numel,))]
            own = np.zeros(1, np.dtype(probed))
            # On a random part of the coordinates a norm is that part's root of the whole.
            own["distance"] = math.sqrt(
                squares * sum(piece.numel for piece in self.sharded.pieces) / probe.numel
            )
            own["gradient_norm"] = probe.gradient_norm
            own["received"] = probe.received
            records = np.frombuffer(b"".join(self.exchange.gather_bytes(own.tobytes())), own.dtype)
            records = records[conditions["is_finite"]]
            probe.conclude(conditions["product"], records["received"])
            distances, gradient_norms = records["distance"], records["gradient_norm"]
        return Divergence(
            are_equal=_alike(conditions),
            distances=tuple(distances.tolist()),
            gradient_norms=tuple(gradient_norms.tolist()),
            signal=probe.conclusion.signal,
            variance=probe.conclusion.variance,
        )


def _are_finite(values: Sequence[Tensor]) -> bool:
    """Return whether all values are finite; the host waits once for each device."""
    return all(on_host([value.isfinite().all() for value in values]))


def _alike(conditions: NDArray[np.void]) -> bool:
    return bool((conditions["digest"] == conditions["digest"][0]).all())
