"""The outer optimizer, for one fragment of the parameters.

Note [The outer step]
    Rank r has the share s_r of the weight, Σ s_r = 1. All ranks hold the anchor a, and its owner the velocity u:

        d ← Σ_r wire((θ_r - a) · s_r)                       in rank order
        u ← μ u + d
        a ← a + wire(η (d + μ u) + e)                       what the owner gathers, on all ranks; e is what
                                                            the wire has lost of the last such change

    On a wire as wide as the masters values are sent, and not their changes, so that nothing is rounded twice:

        d ← θ̄ - a,  θ̄ = Σ_r fl(θ_r · s_r),   a ← θ̄ + (η (d + μ u) - d)

    With η = 1 and μ = 0 both are `stretto.averaging.mean`, to the bit, but for what packed wires lose: they pack the
    ranks' changes as they pack gradients, with error feedback, and the owner's change likewise.

    Without Nesterov's look ahead, u stands instead of d + μ u.

This is `torch.optim.SGD` with the gradient -d.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from stretto.exchange import Exchange, PackedWire, Wire
from stretto.flat import Bucket, FlatSet, Layout, usual_bucket_bytes
from stretto.optimizer import ShardedOptimizer
from stretto.strategies.contract import Launch


class Fragment:
    """A part of the parameters that is sent and arrives as one: whole buckets, with its own exchange.

    Memory: the anchor; the owner's share of the velocity; while it is in flight, its values. On a packed wire the
        rank's residual, and the owner's share of the wire's losses.

    Args:
        exchange: The job's exchange; no other code uses its group while the fragment is in flight.
        sharded: The job's masters, complete on every rank.
        members: Indices of its buckets.
        changed: The format in which the owner's changes are sent.
    """

    def __init__(
        self, exchange: Exchange, sharded: ShardedOptimizer, members: Sequence[int], changed: Wire
    ) -> None:
        self.members = members
        self._masters = [sharded.masters[index] for index in members]
        self._layout = _layout_of(sharded, members)
        self.exchange = exchange.over(self._layout)
        # The sent values, one tensor per flat set, until the arrival is installed; empty at other times.
        self._carried: list[Tensor] = []
        # The masters at the launch, if progress since then is kept.
        self._left: list[Tensor] = []
        self.anchor = self._new()
        """One tensor per flat set, equal on all ranks."""
        self.velocity = self._new_shares()
        """One tensor per bucket, for this rank's slice."""
        self.lost = self._new_shares() if isinstance(changed, PackedWire) else []
        """One tensor per bucket, for this rank's slice: values that must still be added to the anchor."""
        self._changed = changed.for_averages
        self._formats = [self._changed.values.of(flat.dtype) for flat in self._layout.sets]
        # Groups of members that are sent together, within a limit of memory, and whether each group is sent in fewer
        # bits.
        self._runs = list(self._batches())
        # Number of transfers since the job began.
        self._transfers = 0
        self.begin_again()

    @property
    def anchor_by_bucket(self) -> list[Tensor]:
        """Views of the anchor, one per member."""
        return self._views(self.anchor)

    @property
    def numel(self) -> int:
        """Number of elements with padding."""
        return self._layout.numel

    def begin_again(self) -> None:
        """Use the current masters, equal on all ranks, as the anchor, and reset the velocity."""
        self._left = []
        self._carried = []
        if self.members:  # a call over no tensors is refused
            torch._foreach_copy_(self.anchor_by_bucket, self._masters)
            torch._foreach_zero_([*self.velocity, *self.lost])
        if self.exchange.feedback is not None:
            self.exchange.feedback.load_state_dicts([])

    averages_state = False
    """False: an outer step changes only parameters."""

    def load(self, launch: Launch, flats: Sequence[Tensor]) -> None:
        """Copy the values to send, because the masters and `flats` continue to change."""
        if launch.keeps_progress:
            self._left = [master.clone() for master in self._masters]
        self._carried = self._new()
        carried = self._views(self._carried)
        if self.members:
            torch._foreach_copy_(carried, self._masters)
        anchors = self.anchor_by_bucket
        for is_narrow, members in self._runs:
            if is_narrow:
                torch._foreach_sub_(
                    [carried[index] for index in members], [anchors[index] for index in members]
                )

    def transfer(self, share: float, launch: Launch) -> None:
        """Take the outer step with the loaded values; all ranks must call it, in the same order.

        Args:
            share: This rank's part of the weight.
            launch: Learning rate and momentum.
        """
        step = launch.outer
        if step is None:
            raise TypeError("a fragment is sent for an outer step: expected Launch(outer=OuterStep(...))")
        self.exchange.begin_round(self._transfers)
        self._transfers += 1
        feedback = self.exchange.feedback
        flats = [flat.mul_(share) if share else flat.zero_() for flat in self._carried]
        sums = [torch.empty_like(velocity) for velocity in self.velocity]
        if feedback is None:
            self.exchange.reduce_scatter(flats, sums)
        else:
            flats = feedback.begin(flats, ())
            self.exchange.run(self.exchange.summing(flats, sums, whole=False), feedback.add)
            feedback.commit_residuals()
        carried = self._views(self._carried)
        own = [self._own(view) for view in carried]
        anchors = [self._own(view) for view in self.anchor_by_bucket]
        for is_narrow, members in self._runs:
            totals, outgoing, velocity, before = (
                [tensors[index] for index in members] for tensors in (sums, own, self.velocity, anchors)
            )
            changed = totals if is_narrow else torch._foreach_sub(totals, before)
            torch._foreach_mul_(velocity, step.momentum)
            torch._foreach_add_(velocity, changed)
            torch._foreach_copy_(outgoing, velocity)
            if step.nesterov:
                torch._foreach_mul_(outgoing, step.momentum)
                torch._foreach_add_(outgoing, changed)
            torch._foreach_mul_(outgoing, step.learning_rate)
            if not is_narrow:  # its new values, and not its change
                torch._foreach_sub_(outgoing, changed)
                torch._foreach_add_(outgoing, totals)
        self._gather(carried)

    def land(self, mix: float) -> None:
        """Mix the anchor, plus progress since the launch if it is kept, into this rank's masters, which keep the
        share `mix`.
        """
        targets = self.anchor_by_bucket
        if self._left:
            # The anchor, and what has been added since: in the memory of what is dropped here.
            torch._foreach_neg_(self._left)
            torch._foreach_add_(self._left, self._masters)
            torch._foreach_add_(self._left, targets)
            targets = self._left
        if self.members and mix:
            torch._foreach_mul_(self._masters, mix)
            torch._foreach_add_(self._masters, targets, alpha=1 - mix)
        elif self.members:
            torch._foreach_copy_(self._masters, targets)
        # Not sooner: on CUDA the lane's stream may still read it when the lane's host code is through, and memory that
        # is freed goes back to the stream that allocated it. Whoever lands has been ordered after that stream.
        self._carried = []
        self._left = []

    def state_dict(self) -> dict[str, Any]:
        """Return count, anchor, velocity and rounding errors; the tensors are the fragment's own."""
        return {"trips": self._transfers, **self._tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the `state_dict` of the same rank; another wire has no residual, or no losses."""
        self._left = [torch.zeros_like(master) for master in self._masters][: len(state["left"])]
        self._transfers = state["trips"]
        for name, tensors in self._tensors.items():
            for tensor, saved in zip(tensors, state[name], strict=False):
                tensor.copy_(saved)

    @property
    def _tensors(self) -> dict[str, list[Tensor]]:
        return {
            "anchor": self.anchor,
            "velocity": self.velocity,
            "owed": self.exchange.residuals,
            "lost": self.lost,
            "left": self._left,
        }

    def _gather(self, carried: Sequence[Tensor]) -> None:
        """Apply the owners' changes of the anchor on all ranks; each owner's change is in its slice of `carried`."""
        anchors = self.anchor_by_bucket
        if isinstance(self._changed, PackedWire):

            def change(index: int) -> Tensor:
                return self.lost[index].add_(self._own(carried[index]))

            def add(index: int, changes: Tensor) -> None:
                self.lost[index].sub_(self._own(changes))
                anchors[index].add_(changes)

            self.exchange.gather_changes(self._changed, change, add)
            return
        self.exchange.all_gather(self._carried, self._formats)
        for is_narrow, members in self._runs:
            before, arrived = [anchors[index] for index in members], [carried[index] for index in members]
            (torch._foreach_add_ if is_narrow else torch._foreach_copy_)(before, arrived)

    def _batches(self) -> Iterator[tuple[bool, list[int]]]:
        """Yield groups of members, each within a limit of memory, and whether the group is sent in fewer bits."""
        for is_narrow, run in groupby(range(len(self._masters)), key=self._is_narrow):
            batch: list[int] = []
            size = 0
            for index in run:
                batch.append(index)
                size += self.velocity[index].nbytes
                if size >= usual_bucket_bytes(self.velocity[index].device):
                    yield is_narrow, batch
                    batch, size = [], 0
            if batch:
                yield is_narrow, batch

    def _is_narrow(self, index: int) -> bool:
        """Return whether a bucket is sent in fewer bits than its masters have, in either direction."""
        dtype = self._masters[index].dtype
        formats = [wire.values.of(dtype) for wire in (self.exchange.wire, self._changed)]
        return any(one.dtype.itemsize < dtype.itemsize for one in formats)

    def _own(self, whole: Tensor) -> Tensor:
        return whole.view(self.exchange.world_size, -1)[self.exchange.rank]

    def _new_shares(self) -> list[Tensor]:
        world_size = self.exchange.world_size
        return [
            torch.zeros(bucket.numel // world_size, dtype=master.dtype, device=master.device)
            for bucket, master in zip(self._layout.buckets, self._masters, strict=True)
        ]

    def _new(self) -> list[Tensor]:
        return [torch.zeros(flat.numel, dtype=flat.dtype, device=flat.device) for flat in self._layout.sets]

    def _views(self, flats: Sequence[Tensor]) -> list[Tensor]:
        return [
            flats[bucket.set_index].narrow(0, bucket.start, bucket.numel) for bucket in self._layout.buckets
        ]


def _layout_of(sharded: ShardedOptimizer, members: Sequence[int]) -> Layout:
    """Return the layout of some of the buckets: the same slices, side by side."""
    whole = sharded.layout
    places = sorted({0, *(whole.buckets[index].set_index for index in members)})  # an exchange needs a device
    ends = [0] * len(places)
    buckets = []
    for index in members:
        bucket, place = whole.buckets[index], places.index(whole.buckets[index].set_index)
        buckets.append(Bucket(place, ends[place], bucket.numel))
        ends[place] += bucket.numel
    sets = []
    for place, numel in zip(places, ends, strict=True):
        dtype = torch.promote_types(whole.sets[place].dtype, torch.float32)
        sets.append(FlatSet(dtype, dtype, whole.sets[place].device, numel))
    return Layout(whole.world_size, tuple(sets), (), tuple(buckets))
