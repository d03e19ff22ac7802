"""The sharded optimizer: reduced gradients, masters in float32, a private optimizer over them, published values.

The private optimizer sees the masters as segments (`stretto.optimizer.segments`).
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor

from stretto.errors import ConfigError
from stretto.flat import Block, Layout, Owned, Slices
from stretto.optimizer.private import is_elementwise, rebuild
from stretto.optimizer.segments import Piece, Segment, cut_segments, owned_pieces, segment_of
from stretto.optimizer.settings import Hyperparameters, by_value, read_hyperparameters

# Elements of a sum that are widened at a time on a CPU, so that they stay in its cache.
_BLOCK = 2**16
# Elements that are widened at a time on a device, which copies them: 32 MiB, and a few launches per 4 million elements.
_DEVICE_BLOCK = 2**22


class ReducedGradient:
    """The sum over ranks of weighted gradients, on the slices this rank owns.

    Note [One division]
        Gradients are sent as Σ w·g. The division by Σ w, and the clip, happen once: in place at `Step`
        (`become_mean`), out of place and block by block at a `Preview` that comes earlier (`mean_of`), so
        that no second copy of the sums is ever held and both see the same values.
    """

    def __init__(self, sums: Slices, weight: float, norm_squared: float, used: bytes) -> None:
        self.sums = sums
        """Sums, at least float32, over this rank's owned slices."""
        self.weight = weight
        """Σ w over ranks; zero if no rank contributed."""
        self.norm_squared: float | None = norm_squared
        """Squared 2-norm of the whole sum; None until measured."""
        self.used = used
        """One byte per parameter slot: whether any rank's micro-batch used it."""
        self.parts: tuple[ReducedGradient, ...] = ()
        """The two gradients that it sums, until `merge`; otherwise empty."""
        self._spent = False
        self._scale: float | None = None

    def __add__(self, other: "ReducedGradient") -> "ReducedGradient":
        """Return the sum, which takes over the storage of `other` in `merge`."""
        used = (int.from_bytes(self.used) | int.from_bytes(other.used)).to_bytes(len(self.used))
        total = ReducedGradient(other.sums, self.weight + other.weight, 0.0, used)
        total.norm_squared = None
        total.parts = (self, other)
        return total

    def leave_out(self) -> None:
        """Drop the gradient: no step uses it."""
        self.weight = self.norm_squared = 0.0
        self.used = bytes(len(self.used))

    def forget_norm(self) -> None:
        """Drop the measured norm, because the values have changed."""
        self.norm_squared = None

    def merge(self) -> None:
        """Perform pending additions, in place: a third buffer would cost four bytes per owned element.

        Raises:
            ConfigError: The strategy uses a gradient again whose storage has gone into a sum, or been divided.
        """
        if self._spent:
            raise ConfigError(
                "a strategy used a gradient again that it had added to another: pass on the sum itself"
            )
        if not self.parts:
            return
        for part in self.parts:
            part.merge()
            if part._scale is not None:
                raise ConfigError(
                    "a strategy added a gradient that it had stepped with: add first, then step"
                )
            part._spent = True
        addend, into = self.parts
        for total, piece in zip(into.sums.flats, addend.sums.flats, strict=True):
            total.add_(piece)
        self.parts = ()

    def become_mean(self, clip: float) -> None:
        """Divide the sums by the weight and multiply by `clip`, in place, once."""
        if self._scale is None:
            for total in self.sums.flats:
                total.div_(self.weight)
                if clip != 1.0:  # otherwise a pass over memory is saved while the compute lane is busy
                    total.mul_(clip)
            self._scale = clip

    def part(self, segment: Segment) -> Tensor | None:
        """Return the sums of one segment; None if no rank's micro-batch used its parameters."""
        if not self.used[segment.pieces[0].slot.index]:
            return None
        flat = self.sums.flats[segment.set_index]
        return flat[segment.start : segment.stop].view(segment.master.shape)

    def mean_of(self, block: Block, clip: float) -> Tensor:
        """Return the mean of one block of the sums; a copy, unless `become_mean` was called before."""
        part = inside(self.sums, block)
        if self._scale is not None:
            return part
        mean = part.div(self.weight)
        return mean if clip == 1.0 else mean.mul_(clip)


def squared_norm(sums: Slices) -> Tensor:
    """Return the squared 2-norm of the sums on this rank's slices, `()` float64, without waiting for the device.

    In float64, where no square of a float32 value is too large or too small; in flat order, however buckets go.
    """
    device = sums.flats[0].device
    if device.type != "cpu":
        blocks = [part for flat in sums.flats for part in flat.split(_DEVICE_BLOCK)]
        norms = [torch.linalg.vector_norm(one, dtype=torch.float64).square().to(device) for one in blocks]
        return torch.stack(norms).cumsum(0)[-1]  # one after the other
    squares: list[Tensor] = []
    parts = list(map(sums.__getitem__, sums.flat_order))
    numels, last = list(map(Tensor.numel, parts)), 0
    while (first := last) < len(parts):
        together, last = numels[first], first + 1
        if together > _BLOCK:
            square = torch.zeros((), dtype=torch.float64)
            for block in parts[first].split(_BLOCK):
                wider = block.to(torch.float64)
                square += torch.dot(wider, wider)
            squares.append(square)
            continue
        # Neighbours that fit into the cache are widened together: one call for all of them.
        while last < len(parts) and together + numels[last] <= _BLOCK:
            together, last = together + numels[last], last + 1
        wide = torch.cat(parts[first:last], out=torch.empty(together, dtype=torch.float64))
        own = wide.split_with_sizes(numels[first:last])
        squares += map(torch.dot, own, own)
    return torch.stack(squares).cumsum(0)[-1]


class ShardedOptimizer:
    """Holds and steps the slices that one rank owns (all slices if the optimizer is replicated).

    Memory, per owned element: 4 bytes of master, the optimizer's state, and for a `preview` both once more for one
    block.

    A tensor that may not be cut is a segment in its shape and contiguous, so the optimizer sees it as in a plain loop;
    its state is unchanged.

    Note [Unused parameters]
        Stock optimizers skip a parameter without gradient: no decay, no momentum, no step count. A zero in the flat
        buffer is not that. So a parameter that no rank used in an update is cut out into its own segment, with its
        share of the state, and gets no gradient.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[Tensor],
        optimizer: torch.optim.Optimizer,
        *,
        rank: int,
        num_owners: int,
    ) -> None:
        self.layout = layout
        self.owned = Owned(layout, rank, num_owners)
        self.ranges = self.owned.ranges
        self.numel = self.owned.numel
        """Number of elements that this rank owns, including padding."""
        self.masters = self.owned.new()
        self.pieces = list(owned_pieces(self.owned))
        flats = [parameter.detach().reshape(-1) for parameter in parameters]
        places = [self.values(self.masters, piece) for piece in self.pieces]
        values = [flats[one.slot.index][one.offset : one.offset + one.numel] for one in self.pieces]
        if places:
            torch._foreach_copy_(places, values)
        self.segments = cut_segments(self.pieces, self.owned, self.masters)
        """Segments, block after block."""
        num_groups = len(optimizer.param_groups)
        self.optimizer = rebuild(
            optimizer, [[s.master for s in self.segments if s.group == index] for index in range(num_groups)]
        )
        self._ghost = rebuild(optimizer, [[] for _ in range(num_groups)])
        # The user's settings at the last step or preview; empty before the first.
        self._turned: Hyperparameters = []

    def new_sums(self) -> Slices:
        """Return storage for one reduced gradient."""
        return self.owned.new()

    def step(self, gradient: ReducedGradient, hyperparameters: Hyperparameters, clip: float) -> None:
        """Commit one optimizer step with the mean of `gradient` times `clip`; all segments at once."""
        gradient.become_mean(clip)
        if 0 in gradient.used:
            self._isolate_unused(gradient.used)
        self._turn(hyperparameters)
        for segment in self.segments:
            segment.master.grad = gradient.part(segment)
        # Autocast may be on where the user calls `backward`.
        with torch.autocast(self.masters[0].device.type, enabled=False):
            self.optimizer.step()
        for segment in self.segments:
            segment.master.grad = None

    def preview(
        self,
        gradient: ReducedGradient,
        hyperparameters: Hyperparameters,
        clip: float,
        flats: Sequence[Tensor],
    ) -> None:
        """Publish into `flats` the values that `step` would produce.

        The optimizer steps copies, all segments of a block at once, so that nothing has to be undone. No trace remains,
        even if the step creates state for the first time or raises.
        """
        if 0 in gradient.used:
            self._isolate_unused(gradient.used)
        self._turn(hyperparameters)
        for index, segments in groupby(self.segments, key=attrgetter("block")):  # in others all is padding
            block = self.owned.blocks[index]
            published, masters = _within(flats, block), inside(self.masters, block)
            # The copy can be stepped in the memory that is sent, unless that has gaps or a narrower dtype.
            fits = published.is_contiguous() and published.dtype == masters.dtype
            ghost = (published.view(-1) if fits else torch.empty_like(masters)).copy_(masters)
            self._step_ghosts(ghost, block, segments, gradient, clip)
            if not fits:
                published.copy_(ghost.view(published.shape))

    def publish(self, flats: Sequence[Tensor]) -> None:
        """Write the masters into this rank's slices of `flats`, one tensor per flat set."""
        self.place(self.masters, flats)

    def place(self, values: Slices, flats: Sequence[Tensor]) -> None:
        """Write values of this rank's slices into their places in `flats`, one tensor per flat set."""
        for block in self.owned.blocks:
            _within(flats, block).copy_(inside(values, block).view(block.count, block.length))

    def values(self, tensors: Sequence[Tensor], piece: Piece) -> Tensor:
        """Return the part of per-bucket `tensors` (masters or sums) that holds `piece`."""
        return tensors[piece.bucket][piece.start : piece.start + piece.numel]

    def changes(self) -> Hyperparameters:
        """Return copies of the entries of each parameter group that steps have changed, such as a count."""
        return [
            {
                key: value
                for key, value in entries.items()
                if key not in turned or not _is_same(turned[key], value)
            }
            for entries, turned in zip(read_hyperparameters(self.optimizer), self._turned, strict=False)
        ]

    def forget_settings(self) -> None:
        """Let the next step take every entry of the parameter groups from the user's groups, because a checkpoint
        has set them.
        """
        self._turned = []

    def _turn(self, hyperparameters: Hyperparameters) -> None:
        """Apply the settings that the user has changed since the last time; changes by steps stay, as in a plain
        loop.
        """
        for index, (group, settings) in enumerate(
            zip(self.optimizer.param_groups, hyperparameters, strict=True)
        ):
            turned = self._turned[index] if self._turned else dict.fromkeys(group.keys() - {"params"})
            for key in turned.keys() - settings.keys():
                group.pop(key, None)
            for key, value in settings.items():
                if not self._turned or key not in turned or not _is_same(turned[key], value):
                    group[key] = by_value(value)
        self._turned = hyperparameters

    def _step_ghosts(
        self,
        copy: Tensor,
        block: Block,
        segments: Iterable[Segment],
        gradient: ReducedGradient,
        clip: float,
    ) -> None:
        """Step `copy`, of one block's masters, with copies of its state."""
        mean = gradient.mean_of(block, clip)
        groups = self._ghost.param_groups
        for group, entries in zip(groups, read_hyperparameters(self.optimizer), strict=True):
            group.clear()  # of what the last ghosts have counted
            group.update(entries, params=[])
        states: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        ghosts, copies, originals = [], [], []
        for segment in segments:
            inside = slice(segment.start - block.offset, segment.stop - block.offset)
            ghost = copy[inside].view(segment.master.shape)
            ghosts.append(ghost)
            if gradient.part(segment) is None:
                continue
            ghost.grad = mean[inside].view(segment.master.shape)
            groups[segment.group]["params"].append(ghost)
            for key, value in self.optimizer.state.get(segment.master, {}).items():
                if isinstance(value, Tensor) and value.dim():
                    states[ghost][key] = torch.empty_like(value)
                    copies.append(states[ghost][key])
                    originals.append(value)
                else:
                    states[ghost][key] = by_value(value)
        if copies:
            torch._foreach_copy_(copies, originals)
        self._ghost.state = states
        if any(map(itemgetter("params"), groups)):
            with torch.autocast(copy.device.type, enabled=False):
                self._ghost.step()
        for ghost in ghosts:
            ghost.grad = None
        self._ghost.state = defaultdict(dict)
        for group in groups:
            group["params"] = []

    def _isolate_unused(self, used: bytes) -> None:
        """Cut segments in which some parameters were used and some were not."""
        for segment in list(self.segments):
            states = {bool(used[piece.slot.index]) for piece in segment.pieces}
            if len(states) == 2:
                runs = groupby(segment.pieces, key=lambda piece: bool(used[piece.slot.index]))
                self._replace(segment, [segment_of(list(run), self.owned, self.masters) for _, run in runs])

    def _replace(self, segment: Segment, parts: list[Segment]) -> None:
        """Replace `segment` by `parts`, with its state and its group."""
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


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one is other or repr(one) == repr(other)


def inside(values: Slices, block: Block) -> Tensor:
    """Return a block's part of a rank's slices, `(count * length,)`."""
    return values.flats[block.set_index].narrow(0, block.offset, block.count * block.length)


def _within(flats: Sequence[Tensor], block: Block) -> Tensor:
    """Return a block's part of flat sets, `(count, length)`."""
    size, stride = (block.count, block.length), (block.stride, 1)
    return flats[block.set_index].as_strided(size, stride, block.start)


def _cut(value: Any, master: Tensor, low: int, high: int) -> Any:
    """Return a part of one state entry: element-wise tensors are cut, step counts are copied."""
    return value[low:high].clone() if is_elementwise(value, master) else by_value(value)
