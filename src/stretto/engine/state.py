"""The state of a job under names that any world size, any strategy and plain PyTorch understand.

    model.<name>                            θ, committed, under every name of `model.state_dict()`, and the
                                            buffers as ranks agree on them
    master.<name>                           the owner's own values, where the installed ones are narrower
    optimizer.state.<name>.<key>            per parameter, as `get_optimizer_state_dict` flattens it
    optimizer.param_groups.<name>.<key>     hyperparameters
    job.step, job.round_index               counts
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from stretto.engine.compute_lane import ComputeLane
from stretto.errors import ForeignCheckpoint, TornCheckpoint
from stretto.exchange import narrower
from stretto.flat import Fragments, PartedTensor, Shares, Slot
from stretto.owner import Piece, PieceState, adopt_states, piece_states, read_hyperparameters, state_like

State = dict[str, Any]


class JobState:
    """Writes a job's state down, and puts one in its place.

    Note [Aliasing]
        What is written down refers to the job's own tensors, as `state_dict` does everywhere in PyTorch: save
        it before training goes on. A blank one refers to nothing and is allocated when it is read, on the CPU;
        nothing in the job changes before `load`.
    """

    def __init__(self, compute: ComputeLane) -> None:
        self.compute = compute
        self.owner = compute.lane.owner
        self.shares = Shares(self.owner.layout, compute.lane.exchange.rank)
        self.replicated = compute.lane.replicated

    def write(self, *, blank: bool = False) -> State:
        """Return the state as nested dictionaries whose tensors are `PartedTensor`s; all ranks must call.

        Args:
            blank: Refer to nothing, and leave out nothing that a checkpoint might hold.
        """
        masters = {
            slot.name: self.cut(slot, self._master_dtype(slot), [] if blank else self._masters(slot))
            for slot in self.owner.layout.slots
            if blank or self._installed_dtype(slot) != self._master_dtype(slot)
        }
        return {
            "model": self._model(blank),
            **({"master": masters} if masters else {}),
            "optimizer": {**self._optimizer(blank), **self._hyperparameters()},
            "job": {"step": self.compute.steps, "round_index": self.compute.lane.round_index},
        }

    def load(self, state: State) -> None:
        """Put `state`, written for this job and read since, in the place of the job's own.

        Raises:
            TornCheckpoint: A parameter is missing.
            ForeignCheckpoint: The optimizer's state is of another kind.
        """
        model = {name: _whole(name, value) for name, value in state["model"].items()}
        states = {piece: self._piece_state(piece, state["optimizer"]) for piece in self.owner.pieces}
        for piece in self.owner.pieces:
            into = self.owner.values(self.owner.masters, piece)
            for part in ("master", "model"):
                entry = state.get(part, {}).get(piece.slot.name)
                value = None if entry is None else entry.content(piece.offset, piece.numel)
                if value is not None:
                    into.copy_(value)
                    break
        adopt_states(self.owner, states)
        self.compute.guarded.model.load_state_dict(model)
        self._turn(state["optimizer"])
        self.compute.begin_again(state["job"]["step"], state["job"]["round_index"])

    def cut(
        self, slot: Slot, dtype: torch.dtype, fragments: Fragments, *, everywhere: bool = False
    ) -> PartedTensor:
        """Return something of a parameter's shape: this rank's share of it, or all, to be read."""
        return self.shares.cut(slot, dtype, fragments, everywhere=everywhere or self.replicated)

    def pieces_of(self, slot: Slot) -> Iterator[Piece]:
        """Yield the pieces of one parameter that this rank owns."""
        return (piece for piece in self.owner.pieces if piece.slot == slot)
