"""An owner's optimizer state by parameter: cut out of its segments, and put back into new ones."""

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from stretto.flat import ALIGNMENT
from stretto.owner.optimizer import is_elementwise, rebuild
from stretto.owner.owner import Owner
from stretto.owner.segment import Piece, Segment, segment_of

PieceState = Mapping[str, Any]
"""The state of one piece by the optimizer's own keys: flat tensors where it is element-wise, otherwise as it is."""


def piece_states(owner: Owner) -> Iterator[tuple[Piece, PieceState]]:
    """Yield every owned piece with views of its state, `(piece.numel,)`; empty before the first step."""
    for segment in owner.segments:
        state = owner.optimizer.state.get(segment.master, {})
        for piece in segment.pieces:
            low = piece.start - segment.start
            run = slice(low, low + piece.numel)
            yield (
                piece,
                {k: v[run] if is_elementwise(v, segment.master) else v for k, v in state.items()},
            )


def state_like(owner: Owner, group: int, dtype: torch.dtype) -> PieceState:
    """Return state of the kind that one step would give a piece, found out by stepping a probe.

    Args:
        owner: Whose optimizer.
        group: Index of the parameter group.
        dtype: Of the masters.

    Returns:
        Meaningless values under the optimizer's keys; tensors with one dimension are element-wise.
    """
    probe = torch.zeros(ALIGNMENT, dtype=dtype, device=owner.masters[0].device)
    probe.grad = torch.zeros_like(probe)
    groups = [[probe] if index == group else [] for index in range(len(owner.optimizer.param_groups))]
    optimizer = rebuild(owner.optimizer, groups)
    optimizer.step()
    return dict(optimizer.state.get(probe, {}))


def adopt_states(owner: Owner, states: Mapping[Piece, PieceState]) -> None:
    """Replace the optimizer's state.

    Pieces share a segment only where their state outside the elements agrees: parameters that were left out
    of some updates have counted fewer steps.

    Args:
        owner: Whose optimizer.
        states: For every owned piece; empty where the optimizer has not stepped it.
    """
    runs = groupby(
        owner.pieces, key=lambda piece: (piece.bucket, piece.slot.group, _signature(states[piece]))
    )
    owner.segments = [segment_of(list(run), owner.masters) for _, run in runs]
    owner.optimizer.state.clear()
    for index, group in enumerate(owner.optimizer.param_groups):
        group["params"] = [segment.master for segment in owner.segments if segment.group == index]
    packed = owner.optimizer.state_dict()
    by_group = sorted(owner.segments, key=lambda segment: segment.group)
    joined = [_join(segment, states) for segment in by_group]
    packed["state"] = {index: state for index, state in enumerate(joined) if state}
    owner.optimizer.load_state_dict(packed)  # it knows on which device each entry belongs


def _signature(state: PieceState) -> tuple[tuple[str, Any], ...]:
    """Return what the pieces of one segment must have in common."""
    return tuple((key, _number(value)) for key, value in sorted(state.items()))


def _number(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return None if value.dim() else value.item()


def _join(segment: Segment, states: Mapping[Piece, PieceState]) -> dict[str, Any]:
    """Return the state of a segment from that of its pieces."""
    joined: dict[str, Any] = {}
    for key, value in states[segment.pieces[0]].items():
        if not isinstance(value, Tensor):
            joined[key] = value
        elif value.dim() == 0:
            joined[key] = value.clone()
        else:
            joined[key] = value.new_zeros(segment.master.numel())
            for piece in segment.pieces:
                low = piece.start - segment.start
                joined[key][low : low + piece.numel] = states[piece][key]
    return joined
