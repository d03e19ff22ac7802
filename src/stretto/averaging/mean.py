"""The mean of all ranks' replicas.

Note [The mean]
    Rank r has the share s_r of the weight, Σ s_r = 1, the last mean was θ̄, and its masters are θ_r:

        θ̄ ← Σ_r fl(θ_r · s_r)                              in rank order, in float32
        θ̄ ← θ̄ + fl(Σ_r wire((θ_r - θ̄) · s_r))              on a wire narrower than the masters

    The second form sends changes: a 16-bit parameter would forget every change below 2^-9 of it, at every mean. Both
    end with the same bits on all ranks, and on a lone rank the first changes nothing.
"""

import copy
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from stretto.engine.accumulation import GradientBuffer
from stretto.exchange import FP32, Exchange, PlainWire
from stretto.flat import Layout, Slices
from stretto.optimizer import ShardedOptimizer, StateKinds, adopt_states, average_states, piece_states
from stretto.strategies.contract import Launch

Share: TypeAlias = float | Sequence[float]
"""This rank's part of the weight; a list if it differs between buckets."""


class ReplicaMean:
    """Computes means of the masters and optimizer states that all ranks hold; all ranks must call each method alike.

    Args:
        exchange: The job's exchange.
        sharded: This rank's masters, complete, and its optimizer.
    """

    def __init__(self, exchange: Exchange, sharded: ShardedOptimizer) -> None:
        self.last: list[Tensor] | None = None
        """The last mean, one tensor per bucket, equal on all ranks; None if the wire is as wide as the masters."""
        self._is_own = True  # the last mean, and not an anchor
        self._exchange = exchange
        self._sharded = sharded
        self._layout: Layout = sharded.layout
        StateKinds(sharded).check_averages()
        sent = [exchange.wire.values.of(flat.accumulation_dtype).dtype for flat in self._layout.sets]
        pairs = zip(self._layout.buckets, sharded.masters, strict=True)
        if any(sent[bucket.set_index].itemsize < master.dtype.itemsize for bucket, master in pairs):
            self.last = [master.clone() for master in sharded.masters]

    def measure_from(self, anchor: list[Tensor]) -> None:
        """Use `anchor`, equal on all ranks, as the last mean, which saves the memory of a copy."""
        if self.last is not None:
            self.last, self._is_own = anchor, False

    def begin_again(self) -> None:
        """Use the current masters, equal on all ranks, as the last mean."""
        if self.last is not None:
            torch._foreach_copy_(self.last, list(self._sharded.masters))

    def unite(self, share: Share, flats: Sequence[Tensor], *, state: bool) -> None:
        """Replace this rank's replica by the mean of all replicas.

        Args:
            share: This rank's part of the weight. If it is zero, its values are not read, so they may be anything.
            flats: Scratch, one tensor per flat set; left undefined.
            state: Average the optimizer's state too.
        """
        self._average_masters(self._sharded.masters, share, flats)
        if state:
            self._average_state(self._sharded, share)
        if self._is_own:
            self.begin_again()

    def show(self, share: Share | None, flats: Sequence[Tensor]) -> None:
        """Fill `flats` with the mean of all replicas, without changing them; a share of None means that they are
        equal.
        """
        means = self._sharded.owned.cut([master.clone() for master in self._sharded.masters.flats])
        if share is not None:
            self._average_masters(means, share, flats)
        self._sharded.place(means, flats)

    def consensus(self, share: Share | None, of_state: Share) -> ShardedOptimizer:
        """Return a copy of the optimizer with the mean of all masters and states.

        Args:
            share: This rank's part of the weight; None if the masters are equal.
            of_state: Its part in the mean of the states, which may differ even if the masters are equal.
        """
        sharded = copy.deepcopy(self._sharded, {id(self._layout): self._layout})
        if share is not None:
            self._average_masters(sharded.masters, share, GradientBuffer(self._layout).flats)
        self._average_state(sharded, of_state)
        return sharded

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's replica; the tensors are the job's own."""
        states = dict(piece_states(self._sharded))
        return {
            "masters": list(self._sharded.masters),
            "states": [dict(states[piece]) for piece in self._sharded.pieces],
            "last_mean": self.last,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace this rank's replica."""
        torch._foreach_copy_(list(self._sharded.masters), list(state["masters"]))
        if self.last is not None and state["last_mean"] is not None:
            torch._foreach_copy_(self.last, list(state["last_mean"]))
        device = self._sharded.masters[0].device
        adopt_states(
            self._sharded,
            {
                piece: {k: v.to(device) if isinstance(v, Tensor) else v for k, v in entries.items()}
                for piece, entries in zip(self._sharded.pieces, state["states"], strict=True)
            },
        )

    def _average_masters(self, masters: Slices, share: Share, flats: Sequence[Tensor]) -> None:
        if self.last is not None:
            torch._foreach_sub_(masters, self.last)
        self._mean(masters, share, flats, self._exchange.wire.values)
        if self.last is not None:
            torch._foreach_add_(masters, self.last)

    def _average_state(self, sharded: ShardedOptimizer, share: Share) -> None:
        """Average the state in full width on every wire: a second moment changes less per update than 16 bits
        resolve.
        """
        flats = [
            torch.zeros(f.numel, dtype=torch.promote_types(f.dtype, torch.float32), device=f.device)
            for f in self._layout.sets
        ]
        average_states(
            sharded,
            self._exchange.gather_bytes,
            lambda values: self._mean(values, share, flats, FP32),
        )

    def _mean(self, values: Slices, share: Share, flats: Sequence[Tensor], wire: PlainWire) -> None:
        shares = [share] * len(values) if isinstance(share, float) else share
        counting = [(value, part) for value, part in zip(values, shares, strict=True) if part]
        left_out = [value for value, part in zip(values, shares, strict=True) if not part]
        if counting:
            torch._foreach_mul_([value for value, _ in counting], [part for _, part in counting])
        if left_out:  # it need not be finite
            torch._foreach_zero_(left_out)
        self._sharded.place(values, flats)
        self._exchange.all_reduce(flats, values, wire)


class Whole:
    """All parameters as one fragment, which is sent and arrives as the mean of all replicas, without an anchor.

    Args:
        exchange: The job's exchange.
        mean: The mean of the job's replicas.
    """

    def __init__(self, exchange: Exchange, mean: ReplicaMean) -> None:
        self.exchange = exchange
        self._mean = mean
        self.averages_state = False
        """Whether the optimizer's state was averaged too, at the last launch."""
        self._scratch: Sequence[Tensor] = ()

    def load(self, launch: Launch, flats: Sequence[Tensor]) -> None:
        """Send `flats` themselves without a copy, because they arrive in the same update."""
        self._scratch, self.averages_state = flats, launch.state

    def transfer(self, share: float, launch: Launch) -> None:
        """Replace this rank's replica by the mean of all replicas; all ranks must call it.

        Args:
            share: This rank's part of the weight.
            launch: Whether to average the optimizer's state too.
        """
        self._mean.unite(share, self._scratch, state=launch.state)

    def land(self, mix: float) -> None:
        """Do nothing: the replica already is the mean."""

    def begin_again(self) -> None:
        """Use the current masters, equal on all ranks, as the last mean."""
        self._mean.begin_again()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the mean's state is the replica's."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load nothing."""
