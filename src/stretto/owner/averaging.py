"""Averages the optimizer's state over owners that each hold all of it.

Element-wise entries become weighted means. Numbers, such as a step count, cannot be averaged: per parameter, all
take them from the rank that has stepped it most often, the first of several. Where a rank has no state, because it
has not used a parameter yet, it contributes zeros.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stretto.owner.owner import Owner
from stretto.owner.segment import Piece
from stretto.owner.state import PieceState, adopt_states, piece_states, state_like


def average_states(
    owner: Owner,
    gather: Callable[[bytes], Sequence[bytes]],
    mean: Callable[[Sequence[Tensor]], None],
) -> None:
    """Replace the optimizer's state by the average over ranks; all ranks must call.

    Args:
        owner: Of all masters, on this rank.
        gather: Returns every rank's record, in rank order.
        mean: Replaces tensors, one per bucket, by their weighted mean over ranks.
    """
    own = dict(piece_states(owner))
    kinds = _kinds(owner)
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
            if key in state:
                owner.values(sums, piece).copy_(state[key])
        mean(sums)
        for piece, state in states.items():
            if _is_moment(state.get(key)):
                state[key] = owner.values(sums, piece)
    adopt_states(owner, states)


def _kinds(owner: Owner) -> Mapping[Piece, PieceState]:
    """Return, for every piece, meaningless state of the kind that a step would give it."""
    found: dict[tuple[int, torch.dtype], PieceState] = {}
    for piece in owner.pieces:
        key = piece.slot.group, owner.masters[piece.bucket].dtype
        if key not in found:
            found[key] = state_like(owner, *key)
    return {piece: found[piece.slot.group, owner.masters[piece.bucket].dtype] for piece in owner.pieces}


def _table(num_slots: int, states: Mapping[Piece, PieceState], numbers: Sequence[str]) -> NDArray[np.float64]:
    """Return a row per parameter: steps taken plus one, zero without any state; then its numbers."""
    table = np.zeros((num_slots, 1 + len(numbers)))
    for piece, state in states.items():
        if state:
            age = 1.0 + float(state.get("step", 0))
            table[piece.slot.index] = [age, *(float(state.get(key, 0)) for key in numbers)]
    return table


def _agree(gather: Callable[[bytes], Sequence[bytes]], own: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return, for every parameter, the row of the rank that has stepped it most often."""
    tables = np.stack([np.frombuffer(record).reshape(own.shape) for record in gather(own.tobytes())])
    oldest = tables[:, :, 0].argmax(axis=0)
    agreed: NDArray[np.float64] = tables[oldest, np.arange(own.shape[0])]
    return agreed


def _like(kind: Any, number: float | None) -> Any:
    """Return a number in the form of `kind`; what is none stays what it is."""
    if number is None or not _is_number(kind):
        return kind
    return torch.full_like(kind, number) if isinstance(kind, Tensor) else type(kind)(number)


def _is_number(value: Any) -> bool:
    return value.dim() == 0 if isinstance(value, Tensor) else isinstance(value, int | float)


def _is_moment(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 1
