"""Masters and optimizer state in other hands: from ranks that own a share each to ranks that own everything, and back.

Both owners have one layout, so a piece of either lies in one bucket. Buckets go one after the other; what a rank lacks
travels as records, so that state of any shape and dtype comes along.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.optimizer.segments import Piece
from stretto.optimizer.sharded import ShardedOptimizer
from stretto.optimizer.state import PieceState, adopt_states, piece_states
from stretto.packed import pack, unpack

_Run = tuple[int, int, Tensor, dict[str, Any]]
"""A parameter's slot, the first element in it, the masters from there on, `(numel,)`, and their state."""


def hand_over(
    old: ShardedOptimizer, new: ShardedOptimizer, gather: Callable[[bytes], Sequence[bytes]]
) -> None:
    """Give `new` the masters and the optimizer state of `old`; all ranks must call.

    Args:
        old: This rank's. Ranks that own everything hold the same.
        new: This rank's, over the same layout; its settings stay.
        gather: Returns every rank's record, in rank order.
    """
    lacks = new.numel > old.numel  # with padding: the same on all ranks
    held = dict(piece_states(old))
    states: dict[Piece, PieceState] = {}
    for bucket in range(len(old.layout.buckets)):
        runs: list[_Run] = [
            (piece.slot.index, piece.offset, old.values(old.masters, piece), dict(held[piece]))
            for piece in old.pieces
            if piece.bucket == bucket
        ]
        if lacks:
            what = f"masters of bucket {bucket}"
            runs = [run for record in gather(pack(_apart(runs), what)) for run in unpack(record, what)]
        for piece in new.pieces:
            if piece.bucket == bucket:
                master, states[piece] = _joined(piece, runs)
                new.values(new.masters, piece).copy_(master)
    adopt_states(new, states)


def _apart(runs: Sequence[_Run]) -> list[_Run]:
    """Return copies: a view would travel with all that it is a view of."""
    return [
        (
            slot,
            offset,
            values.clone(),
            {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()},
        )
        for slot, offset, values, state in runs
    ]


def _joined(piece: Piece, runs: Sequence[_Run]) -> tuple[Tensor, PieceState]:
    """Return the masters and the state of a piece, out of the runs that it lies in."""

    def is_cut(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() > 0 and not piece.slot.is_whole

    masters, states = [], []
    for slot, offset, values, state in sorted(runs, key=lambda run: run[:2]):
        low = max(piece.offset, offset) - offset
        high = min(piece.offset + piece.numel, offset + values.numel()) - offset
        if slot == piece.slot.index and low < high:
            masters.append(values[low:high])
            states.append({key: v[low:high] if is_cut(v) else v for key, v in state.items()})
    joined = {
        key: torch.cat([state[key] for state in states]) if is_cut(value) else value
        for key, value in states[0].items()
    }
    return torch.cat(masters), joined
