"""The sharded optimizer: masters in float32, a private optimizer over them, and the values that are published.

The private optimizer sees the masters as segments: runs of elements that it treats alike.
"""

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from stretto.checksums import digest
from stretto.flat import ALIGNMENT, Layout, Slot
from stretto.optimizer.gradient import ReducedGradient
from stretto.optimizer.private import Hyperparameters, is_elementwise, rebuild


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """The part of one parameter that lies in one bucket's owned slice."""

    slot: Slot
    bucket: int
    """Index of the bucket."""
    start: int
    """First element within the owned slice; a multiple of `ALIGNMENT`."""
    offset: int
    """First element within the flattened parameter."""
    numel: int

    @property
    def padded_stop(self) -> int:
        """One past the last element within the owned slice, with the padding up to the next slot."""
        return self.start + -(-self.numel // ALIGNMENT) * ALIGNMENT


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A run of one bucket's owned slice whose elements the optimizer treats alike."""

    bucket: int
    """Index of the bucket."""
    group: int
    """Index of the parameter group."""
    pieces: tuple[Piece, ...]
    """What lies in the run, in order."""
    master: Tensor
    """View of the masters, `(stop - start,)`, with padding; what the private optimizer steps."""

    @property
    def start(self) -> int:
        """First element within the owned slice."""
        return self.pieces[0].start

    @property
    def stop(self) -> int:
        """One past the last element within the owned slice."""
        return self.pieces[-1].padded_stop


def owned_pieces(layout: Layout, rank: int, num_owners: int) -> Iterator[Piece]:
    """Yield the pieces of parameters that `rank` owns, bucket by bucket in flat order."""
    for index, bucket in enumerate(layout.buckets):
        low, high = bucket.owned_range(rank, num_owners)
        for slot in layout.slots_of_set(bucket.set_index):
            start, stop = max(slot.start, low), min(slot.stop, high)
            if start < stop:
                yield Piece(slot, index, start - low, start - slot.start, stop - start)


def segment_of(pieces: Sequence[Piece], masters: Sequence[Tensor]) -> Segment:
    """Return the segment over neighbouring pieces of one bucket and group."""
    first, last = pieces[0], pieces[-1]
    master = masters[first.bucket][first.start : last.padded_stop]
    return Segment(first.bucket, first.slot.group, tuple(pieces), master)


def cut_segments(pieces: Sequence[Piece], masters: Sequence[Tensor]) -> list[Segment]:
    """Cut the owned pieces into as few segments as buckets and groups allow."""
    runs = groupby(pieces, key=lambda piece: (piece.bucket, piece.slot.group))
    return [segment_of(list(run), masters) for _, run in runs]


MASTER = ""
"""Name of a segment's master among the digests of its state."""


class ShardedOptimizer:
    """Holds and steps the slices that one rank owns (all of them where the optimizer is replicated).

    Memory, per owned element: 4 bytes of master, what the optimizer's state takes, and for a `preview` both
    once more for one segment.

    Note [Unused parameters]
        Stock optimizers skip a parameter without gradient: no decay, no momentum, no step count. A zero in
        the flat buffer is not that. So a parameter that no rank used in an update is cut out into a segment
        of its own, with its share of the state, and gets no gradient.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        rank: int,
        num_owners: int,
    ) -> None:
        self.layout = layout
        self.ranges = [bucket.owned_range(rank, num_owners) for bucket in layout.buckets]
        self.masters = [self._empty(index) for index in range(len(layout.buckets))]
        self.pieces = list(owned_pieces(layout, rank, num_owners))
        self.adopt(parameters)
        self.segments = cut_segments(self.pieces, self.masters)
        num_groups = len(optimizer.param_groups)
        self.optimizer = rebuild(
            optimizer, [[s.master for s in self.segments if s.group == index] for index in range(num_groups)]
        )
        self._ghost = rebuild(optimizer, [[torch.zeros(1)] for _ in range(num_groups)])

    @property
    def numel(self) -> int:
        """Elements that this rank owns, padding included."""
        return sum(high - low for low, high in self.ranges)

    def adopt(self, parameters: Sequence[nn.Parameter]) -> None:
        """Copy the parameters' present values into the masters."""
        for piece in self.pieces:
            flat = parameters[piece.slot.index].detach().reshape(-1)
            self.values(self.masters, piece).copy_(flat[piece.offset : piece.offset + piece.numel])

    def new_sums(self) -> list[Tensor]:
        """Return storage for one reduced gradient, one tensor per bucket."""
        return [self._empty(index) for index in range(len(self.layout.buckets))]

    def step(self, gradient: ReducedGradient, hyperparameters: Hyperparameters, clip: float) -> None:
        """Commit one optimizer step with the mean of `gradient` times `clip`; all segments at once."""
        gradient.become_mean(clip)
        self._isolate_unused(gradient.used)
        self._turn(hyperparameters)
        for segment in self.segments:
            segment.master.grad = self._slice(gradient, segment) if _is_used(segment, gradient) else None
        self.optimizer.step()
        for segment in self.segments:
            segment.master.grad = None

    def rehearse(
        self, gradient: ReducedGradient, hyperparameters: Hyperparameters, clip: float
    ) -> list[dict[str, int]]:
        """Return, by segment, digests of what `step` would leave in the master and in each tensor of its state.

        Like a preview it leaves no trace. With deterministic arithmetic, these are the correct digests.
        """
        self._isolate_unused(gradient.used)
        self._turn(hyperparameters)
        digests = []
        for segment in self.segments:
            ghost = segment.master.clone()
            state: Mapping[str, Any] = self.optimizer.state.get(segment.master, {})
            if _is_used(segment, gradient):
                mean = gradient.mean_of(self._slice(gradient, segment), clip)
                state = self._step_ghost(ghost, segment, mean)
            digests.append(_digests(ghost, state))
        return digests

    def digests(self) -> list[dict[str, int]]:
        """Return, by segment, digests of the present master and of each tensor of its state."""
        return [_digests(one.master, self.optimizer.state.get(one.master, {})) for one in self.segments]

    def preview(
        self,
        gradient: ReducedGradient,
        hyperparameters: Hyperparameters,
        clip: float,
        flats: Sequence[Tensor],
    ) -> None:
        """Publish into `flats` the values that `step` would give.

        The optimizer steps copies, segment by segment, so that nothing has to be undone. No trace remains, even if the
        step creates state for the first time or raises.
        """
        self._isolate_unused(gradient.used)
        self._turn(hyperparameters)
        for segment in self.segments:
            low = self.ranges[segment.bucket][0]
            published = self._flat(flats, segment.bucket)[low + segment.start : low + segment.stop]
            # The copy can be stepped in the memory that is sent, unless that has a narrower dtype.
            fits = published.dtype == segment.master.dtype
            ghost = (published if fits else torch.empty_like(segment.master)).copy_(segment.master)
            if _is_used(segment, gradient):
                mean = gradient.mean_of(self._slice(gradient, segment), clip)
                self._step_ghost(ghost, segment, mean)
            if not fits:
                published.copy_(ghost)

    def publish(self, flats: Sequence[Tensor]) -> None:
        """Write the masters into this rank's slices of `flats`, one tensor per flat set."""
        for index, (master, (low, high)) in enumerate(zip(self.masters, self.ranges, strict=True)):
            self._flat(flats, index)[low:high].copy_(master)

    def values(self, tensors: Sequence[Tensor], piece: Piece) -> Tensor:
        """Return the part of per-bucket `tensors` (masters or sums) that holds `piece`."""
        return tensors[piece.bucket][piece.start : piece.start + piece.numel]

    def _empty(self, bucket: int) -> Tensor:
        flat = self.layout.sets[self.layout.buckets[bucket].set_index]
        low, high = self.ranges[bucket]
        return torch.zeros(
            high - low, dtype=torch.promote_types(flat.dtype, torch.float32), device=flat.device
        )

    def _flat(self, flats: Sequence[Tensor], bucket: int) -> Tensor:
        return flats[self.layout.buckets[bucket].set_index]

    def _slice(self, gradient: ReducedGradient, segment: Segment) -> Tensor:
        return gradient.sums[segment.bucket][segment.start : segment.stop]

    def _turn(self, hyperparameters: Hyperparameters) -> None:
        for group, settings in zip(self.optimizer.param_groups, hyperparameters, strict=True):
            group.update(settings)

    def _step_ghost(self, ghost: Tensor, segment: Segment, mean: Tensor) -> Mapping[str, Any]:
        """Step `ghost`, a copy of one segment's master, with a copy of its state, and return the latter."""
        ghost.grad = mean
        state = self.optimizer.state.get(segment.master, {})
        self._ghost.param_groups = [
            {**group, "params": [ghost] if index == segment.group else []}
            for index, group in enumerate(self.optimizer.param_groups)
        ]
        self._ghost.state = defaultdict(dict, {ghost: {key: _copied(value) for key, value in state.items()}})
        self._ghost.step()
        stepped: Mapping[str, Any] = self._ghost.state[ghost]
        self._ghost.state = defaultdict(dict)
        ghost.grad = None
        return stepped

    def _isolate_unused(self, used: bytes) -> None:
        """Cut segments in which some parameters were used and some were not."""
        for segment in list(self.segments):
            states = {bool(used[piece.slot.index]) for piece in segment.pieces}
            if len(states) == 2:
                runs = groupby(segment.pieces, key=lambda piece: bool(used[piece.slot.index]))
                self._replace(segment, [segment_of(list(run), self.masters) for _, run in runs])

    def _replace(self, segment: Segment, parts: list[Segment]) -> None:
        """Let `parts` take the place, the state and the group membership of `segment`."""
        state = self.optimizer.state.pop(segment.master, {})
        for part in parts:
            low, high = part.start - segment.start, part.stop - segment.start
            if state:
                self.optimizer.state[part.master] = {
                    key: _cut(value, segment.master, low, high) for key, value in state.items()
                }
        members = self.optimizer.param_groups[segment.group]["params"]
        position = next(i for i, member in enumerate(members) if member is segment.master)
        members[position : position + 1] = [part.master for part in parts]
        position = self.segments.index(segment)
        self.segments[position : position + 1] = parts


def _digests(master: Tensor, state: Mapping[str, Any]) -> dict[str, int]:
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    return {key: digest(value) for key, value in {MASTER: master, **tensors}.items()}


def _is_used(segment: Segment, gradient: ReducedGradient) -> bool:
    return bool(gradient.used[segment.pieces[0].slot.index])


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _cut(value: Any, master: Tensor, low: int, high: int) -> Any:
    """Return the share of one state entry: element-wise tensors are cut, step counts are copied."""
    return value[low:high].clone() if is_elementwise(value, master) else _copied(value)
