"""The optimizer's state by parameter: cut out of its segments, put back into new ones, and averaged over ranks.

In an average, element-wise entries become weighted means, and so do tensors of any shape that belong to a whole
parameter; these are sent instead, so they must fit there. Numbers, such as a step count, cannot be averaged: for
each parameter, all ranks take them from the rank that has stepped it most often, the first of several. All state of a
whole parameter without dimensions is numbers. A rank that has no state yet, because it has not used a parameter,
contributes zeros.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.checksums import on_host
from stretto.errors import UnsupportedOptimizer
from stretto.flat import ALIGNMENT, Owned, Slices, Slot
from stretto.optimizer.over_shards import alone
from stretto.optimizer.private import is_elementwise, rebuild
from stretto.optimizer.segments import Piece, Segment, cut_segments
from stretto.optimizer.sharded import ShardedOptimizer

PieceState = Mapping[str, Any]
"""The state of one piece by the optimizer's own keys: flat tensors where it is element-wise, otherwise unchanged. That
of a whole tensor is as the optimizer keeps it, tensors of any shape."""


def piece_states(owner: ShardedOptimizer) -> Iterator[tuple[Piece, PieceState]]:
    """Yield every owned piece and its state, empty before the first step: element-wise as views, `(piece.numel,)`."""
    for segment in owner.segments:
        state = owner.optimizer.state.get(segment.master, {})
        if segment.pieces[0].slot.is_whole:
            yield segment.pieces[0], dict(state)
            continue
        for piece in segment.pieces:
            low = owner.owned.offsets[piece.bucket] + piece.start - segment.start
            run = slice(low, low + piece.numel)
            yield (
                piece,
                {k: v[run] if is_elementwise(v, segment.master) else v for k, v in state.items()},
            )


class StateKinds:
    """The kind of state that one step would create for a piece of a parameter, found by stepping probes.

    Args:
        owner: The optimizer's owner.
    """

    def __init__(self, owner: ShardedOptimizer) -> None:
        self._owner = owner
        self._found: dict[tuple[int, int, tuple[int, ...]], PieceState] = {}

    def of(self, slot: Slot) -> PieceState:
        """Return values without meaning under the optimizer's keys; for a whole parameter, in their shapes.

        Of any other parameter, tensors with one dimension are element-wise.
        """
        shape = slot.shape if slot.is_whole else (ALIGNMENT,)
        key = slot.set_index, slot.group, shape
        if key not in self._found:
            self._found[key] = self._probe(*key)
        return self._found[key]

    def check_averages(self) -> None:
        """Raise unless all state can be averaged in the parameters' places.

        Raises:
            UnsupportedOptimizer: Names the first parameter and the entry that cannot.
        """
        for slot in self._owner.layout.slots:
            for key, value in self.of(slot).items() if slot.is_whole and slot.numel else ():
                if _is_moment(value) and (value.numel() > slot.numel or not value.is_floating_point()):
                    raise UnsupportedOptimizer(
                        f"the optimizer keeps {key!r}, {value.dtype} of shape {tuple(value.shape)}, for "
                        f"parameter {slot.name!r} of shape {slot.shape}: expected floating-point values, and "
                        "no more of them than the parameter has, because Stretto sends averages of state in "
                        "the space of the parameter; use a strategy without averages, such as ZeRO1()"
                    )

    def check_over_shards(self) -> None:
        """Raise unless the state of whole tensors, of which ranks hold rows, can be cut by rows too.

        Raises:
            UnsupportedOptimizer: Names the first parameter and the entry that cannot.
        """
        for slot in (one for one in self._owner.layout.slots if one.is_whole and one.shard is not None):
            for key, value in self.of(slot).items():
                if _is_moment(value) and value.shape != slot.shape:
                    raise UnsupportedOptimizer(
                        f"the optimizer keeps {key!r} of shape {tuple(value.shape)} for {slot.shape[0]} rows "
                        f"of parameter {slot.name!r}, of shape {slot.shape}: expected numbers, or values of "
                        "the same shape, where the ranks of a node share a model; use an optimizer with such "
                        "state, as AdamW and Muon"
                    )

    def _probe(self, set_index: int, group: int, shape: tuple[int, ...]) -> PieceState:
        flat, sharded = self._owner.layout.sets[set_index], self._owner.optimizer
        # Not zeros: an optimizer may divide by the norm of a whole tensor.
        probe = torch.ones(shape, dtype=torch.promote_types(flat.dtype, torch.float32), device=flat.device)
        probe.grad = torch.ones_like(probe)
        groups = [[probe] if index == group else [] for index in range(len(sharded.param_groups))]
        optimizer = rebuild(alone(sharded), groups)  # whoever asks does it by itself
        optimizer.step()
        return dict(optimizer.state.get(probe, {}))


def adopt_states(owner: ShardedOptimizer, states: Mapping[Piece, PieceState]) -> None:
    """Replace the optimizer's state.

    Pieces share a segment only where their state outside the elements agrees: parameters that were skipped
    of some updates have counted fewer steps.

    Args:
        owner: The optimizer's owner.
        states: For every owned piece; empty where the optimizer has not stepped it.
    """
    numbers = _numbers_of(states)

    def in_common(piece: Piece) -> tuple[tuple[str, Any], ...]:
        return tuple(
            (key, numbers.get(id(value)) if isinstance(value, Tensor) else value)
            for key, value in sorted(states[piece].items())
        )

    owner.segments = cut_segments(owner.pieces, owner.owned, owner.masters, in_common)
    owner.optimizer.state.clear()
    for index, group in enumerate(owner.optimizer.param_groups):
        group["params"] = [segment.master for segment in owner.segments if segment.group == index]
    packed = owner.optimizer.state_dict()
    by_group = sorted(owner.segments, key=lambda segment: segment.group)
    joined = [_join(segment, states, owner.owned) for segment in by_group]
    packed["state"] = {index: state for index, state in enumerate(joined) if state}
    owner.optimizer.load_state_dict(packed)  # it knows on which device each entry belongs


def _numbers_of(states: Mapping[Piece, PieceState]) -> dict[int, float]:
    """Return the values of all tensors without dimensions, by their ids; the host waits once for each device."""
    values = (value for state in states.values() for value in state.values())
    found = {id(value): value for value in values if isinstance(value, Tensor) and not value.dim()}
    bits = on_host([value.double().view(torch.int64) for value in found.values()])
    return dict(zip(found, np.array(bits, np.uint64).view(np.float64).tolist(), strict=True))


def _join(segment: Segment, states: Mapping[Piece, PieceState], owned: Owned) -> dict[str, Any]:
    """Return the state of a segment from the states of its pieces."""
    if segment.pieces[0].slot.is_whole:
        state = states[segment.pieces[0]]
        return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
    joined: dict[str, Any] = {}
    for key, value in states[segment.pieces[0]].items():
        if not isinstance(value, Tensor):
            joined[key] = value
        elif value.dim() == 0:
            joined[key] = value.clone()
        else:
            flat, end = value.new_empty(segment.master.numel()), 0
            for piece in segment.pieces:
                low = owned.offsets[piece.bucket] + piece.start - segment.start
                flat[end:low] = 0  # padding; zeros everywhere would be a pass over memory more
                end = low + piece.numel
                flat[low:end] = states[piece][key]
            flat[end:] = 0
            joined[key] = flat
    return joined


def average_states(
    owner: ShardedOptimizer,
    gather: Callable[[bytes], Sequence[bytes]],
    mean: Callable[[Slices], None],
) -> None:
    """Replace the optimizer's state by the average over ranks; all ranks must call.

    Args:
        owner: All masters on this rank.
        gather: Returns every rank's record, in rank order.
        mean: Replaces values by their weighted mean over ranks.
    """
    own = dict(piece_states(owner))
    probed = StateKinds(owner)
    kinds = {piece: state or probed.of(piece.slot) for piece, state in own.items()}
    numbers = sorted({key for kind in kinds.values() for key, value in kind.items() if _is_number(value)})
    table = _agree(gather, _table(len(owner.layout.slots), own, numbers))
    states: dict[Piece, dict[str, Any]] = {}
    for piece, kind in kinds.items():
        age, *values = table[piece.slot.index].tolist()
        found = dict(zip(numbers, values, strict=True))
        states[piece] = {key: _like(value, found.get(key)) for key, value in kind.items()} if age else {}
    for key in sorted(
        {key for state in states.values() for key, value in state.items() if _is_moment(value)}
    ):
        sums = owner.new_sums()
        for piece, state in own.items():
            if _is_moment(state.get(key)):
                _place(owner, sums, piece, state[key]).copy_(state[key])
        mean(sums)
        for piece, state in states.items():
            if _is_moment(state.get(key)):
                state[key] = _place(owner, sums, piece, state[key])
    adopt_states(owner, states)


def _place(owner: ShardedOptimizer, sums: Sequence[Tensor], piece: Piece, moment: Tensor) -> Tensor:
    """Return the part of an entry's place in `sums` that it uses: all of it, or the size of a whole parameter's
    entry.
    """
    place = owner.values(sums, piece)
    return place[: moment.numel()].view(moment.shape) if piece.slot.is_whole else place


def _table(num_slots: int, states: Mapping[Piece, PieceState], numbers: Sequence[str]) -> NDArray[np.float64]:
    """Return a row per parameter: steps taken plus one, zero without any state; then its numbers."""
    table, held = np.zeros((num_slots, 1 + len(numbers))), _numbers_of(states)
    for piece, state in states.items():
        if state:
            found: dict[str, Any] = {k: held.get(id(one), one) for k, one in state.items() if _is_number(one)}
            age = 1.0 + found.get("step", 0)
            table[piece.slot.index] = [age, *(found.get(key, 0.0) for key in numbers)]
    return table


def _agree(gather: Callable[[bytes], Sequence[bytes]], own: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return, for every parameter, the row of the rank that has stepped it most often."""
    tables = np.stack([np.frombuffer(record).reshape(own.shape) for record in gather(own.tobytes())])
    oldest = tables[:, :, 0].argmax(axis=0)
    agreed: NDArray[np.float64] = tables[oldest, np.arange(own.shape[0])]
    return agreed


def _like(kind: Any, number: float | None) -> Any:
    """Return a number in the dtype and shape of `kind`; other values are not changed."""
    if number is None or not _is_number(kind):
        return kind
    return torch.full_like(kind, number) if isinstance(kind, Tensor) else type(kind)(number)


def _is_number(value: Any) -> bool:
    return value.dim() == 0 if isinstance(value, Tensor) else isinstance(value, int | float)


def _is_moment(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0
