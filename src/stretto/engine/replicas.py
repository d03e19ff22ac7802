"""Replicas that step alone: what a rank has done since the last average, and the average of all replicas.

Note [The average]
    Rank r has contributed the weight ω_r since the last average θ̄, and its masters are θ_r:

        θ̄ ← Σ_r fl(θ_r · fl(ω_r / Σ ω))                              in rank order, in float32
        θ̄ ← θ̄ + fl(Σ_r wire((θ_r - θ̄) · fl(ω_r / Σ ω)))              on a wire narrower than the masters

    The second form sends what has changed: a 16-bit parameter would forget every change below 2^-9 of it, at every
    average. Both end with the same bits on all ranks, and on a lone rank the first changes nothing.
"""

import copy
import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.engine.roll_call import Attendance, RollCall, Vote
from stretto.engine.window import Window
from stretto.errors import RanksDisagree
from stretto.exchange import Exchange, narrower
from stretto.flat import GradientBuffer, Layout
from stretto.optimizer import PieceState, ShardedOptimizer, adopt_states, average_states, piece_states


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """What one rank has of its own, for a checkpoint."""

    masters: list[Tensor]
    states: Sequence[PieceState]
    """In the order of the owner's pieces."""
    last_average: list[Tensor] | None
    window: Window


class Replicas:
    """One rank's replica among the others.

    Args:
        exchange: Of the job.
        owner: Of this rank's masters, all of them.
    """

    def __init__(self, exchange: Exchange, owner: ShardedOptimizer) -> None:
        self.window = self._new_window(owner.layout)
        self.last_average: list[Tensor] | None = None
        """One tensor per bucket, equal on all ranks; None where the wire is as wide as the masters."""
        self._exchange = exchange
        self._owner = owner
        self._layout = owner.layout
        if any(self._is_narrow(index) for index in range(len(owner.masters))):
            self.last_average = [master.clone() for master in owner.masters]
        self._own_sums: list[Tensor] | None = None
        self._states_are_equal = True
        """As far as the last average went; steps since then part them."""

    def begin_again(self) -> None:
        """Take the present masters, alike on all ranks, for an average."""
        self.window = self._new_window(self._layout)
        self._states_are_equal = True
        if self.last_average is not None:
            self._copy(self._owner.masters, self.last_average)

    def write(self) -> Replica:
        """Return this rank's replica; it refers to the job's own tensors."""
        states = [dict(state) for _, state in piece_states(self._owner)]
        return Replica(
            masters=self._owner.masters, states=states, last_average=self.last_average, window=self.window
        )

    def adopt(self, replica: Replica) -> None:
        """Put a written replica in the place of this rank's."""
        self._copy(replica.masters, self._owner.masters)
        if self.last_average is not None and replica.last_average is not None:
            self._copy(replica.last_average, self.last_average)
        device = self._owner.masters[0].device
        adopt_states(
            self._owner,
            {
                piece: {k: v.to(device) if isinstance(v, Tensor) else v for k, v in state.items()}
                for piece, state in zip(self._owner.pieces, replica.states, strict=True)
            },
        )
        self.window = replica.window
        self._states_are_equal = False

    @property
    def rounds(self) -> int:
        """Since the last average."""
        return self.window.rounds

    @property
    def are_equal(self) -> bool:
        """Whether all ranks hold the same masters and the same optimizer state."""
        return self._states_are_equal and self.window.rounds == 0

    def own_gradient(self, flats: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's own gradients by bucket: the buffer itself, where it is as wide as the masters."""
        contents = [flats[bucket.set_index][bucket.start : bucket.stop] for bucket in self._layout.buckets]
        dtypes = [master.dtype for master in self._owner.masters]
        if [content.dtype for content in contents] == dtypes:
            return contents
        self._own_sums = self._own_sums or self._owner.new_sums()
        for total, content in zip(self._own_sums, contents, strict=True):
            total.copy_(content)
        return self._own_sums

    def meet(self, attendance: Attendance) -> RollCall:
        """Hold the roll call of an average.

        Args:
            attendance: What this rank says of its last round; the window's sums take the place of that round's.

        Raises:
            RanksDisagree: Ranks average in different rounds, so their coins fall differently.
        """
        own = self.window.attend(attendance)
        records = self._exchange.gather_bytes(RollCall.pack(own))
        call = RollCall.unpack(records, len(own.used), len(own.changed))
        rounds = call.records["round_index"].tolist()
        drains = [vote == Vote.DRAIN for vote in call.votes]
        planned = {r for r, drain in zip(rounds, drains, strict=True) if not drain}
        # A rank that drains comes early and waits; one that comes late has passed an average by.
        if len(planned) > 1 or (planned and max(rounds) > max(planned)):
            raise RanksDisagree(
                f"rank {self._exchange.rank}, after step {attendance.step}: ranks average in different rounds, "
                f"{rounds} by rank (below zero: settles or saves instead): a rate that is a function must give the "
                "same on all ranks and depend on nothing but the round's index, and all ranks must settle and save at "
                "the same updates"
            )
        return call

    def average(self, call: RollCall, flats: Sequence[Tensor], *, state: bool) -> None:
        """Average the replicas, and begin the next window; all ranks must call.

        Args:
            call: The roll call of this average.
            flats: Scratch, one tensor per flat set; left undefined.
            state: Average the optimizer's state too.
        """
        share = call.share(self._exchange.rank)
        states_are_equal = self._states_are_equal if share is None else state
        if share is not None:
            self.unite(share, flats, state=state)
        self.begin_again()
        self._states_are_equal = states_are_equal

    def unite(self, share: float, flats: Sequence[Tensor], *, state: bool) -> None:
        """Replace this rank's replica by the mean of all; all ranks must call.

        Args:
            share: This rank's part of the weight. Zero: its values are not looked at, so they may be anything.
            flats: Scratch, one tensor per flat set; left undefined.
            state: Average the optimizer's state too.
        """
        self._average_masters(self._owner.masters, share, flats)
        if state:
            self._average_state(self._owner, share)

    def show_mean(self, share: float | None, flats: Sequence[Tensor]) -> None:
        """Fill `flats` with the mean of all replicas, which stay as they are; all ranks must call."""
        means = [master.clone() for master in self._owner.masters]
        if share is not None:
            self._average_masters(means, share, flats)
        for bucket, mean in zip(self._layout.buckets, means, strict=True):
            flats[bucket.set_index][bucket.start : bucket.stop].copy_(mean)

    def consensus(self, share: float | None) -> ShardedOptimizer:
        """Return a copy of the owner that holds the mean of all replicas and states; all ranks must call."""
        owner = copy.deepcopy(self._owner, {id(self._layout): self._layout})
        if share is not None:
            self._average_masters(owner.masters, share, GradientBuffer(self._layout).flats)
        # States may differ although nobody has stepped since the last average.
        self._average_state(owner, 1 / self._exchange.world_size if share is None else share)
        return owner

    def _average_masters(self, masters: Sequence[Tensor], share: float, flats: Sequence[Tensor]) -> None:
        if self.last_average is not None:
            torch._foreach_sub_(list(masters), self.last_average)
        self._mean(masters, share, flats)
        if self.last_average is not None:
            torch._foreach_add_(list(masters), self.last_average)

    def _average_state(self, owner: ShardedOptimizer, share: float) -> None:
        """In full width whatever the wire: a second moment changes by less, per update, than 16 bits resolve."""
        flats = [
            torch.zeros(f.numel, dtype=torch.promote_types(f.dtype, torch.float32), device=f.device)
            for f in self._layout.sets
        ]

        def mean(values: Sequence[Tensor]) -> None:
            self._mean(values, share, flats)

        held, self._exchange.wire = self._exchange.wire, torch.float32
        try:
            average_states(owner, self._exchange.gather_bytes, mean)
        finally:
            self._exchange.wire = held

    def _mean(self, values: Sequence[Tensor], share: float, flats: Sequence[Tensor]) -> None:
        for bucket, value in zip(self._layout.buckets, values, strict=True):
            flats[bucket.set_index][bucket.start : bucket.stop].copy_(
                value.mul_(share) if share else value.zero_()  # what is left out need not be finite
            )
        self._exchange.all_reduce(flats, values)

    def _is_narrow(self, index: int) -> bool:
        """Return whether bucket `index` travels in fewer bits than its masters have."""
        flat = self._layout.sets[self._layout.buckets[index].set_index]
        sent = narrower(self._exchange.wire, flat.accumulation_dtype)
        return sent.itemsize < self._owner.masters[index].dtype.itemsize

    @staticmethod
    def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)

    @staticmethod
    def _new_window(layout: Layout) -> Window:
        return Window(bytearray(len(layout.slots)))
