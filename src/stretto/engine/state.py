"""The state of a job under names that any world size, any strategy and plain PyTorch understand.

model.<name>                            committed parameters, under every name of `model.state_dict()` (before
                                        `torch.compile`), and the buffers as ranks agree on them
master.<name>                           the owner's values, where models show something coarser
optimizer.state.<name>.<key>            per parameter, as PyTorch's `flatten_optimizer_state_dict` has it
optimizer.param_groups.<name>.<key>     hyperparameters; of a group without parameters under its place
job.step, job.round_index               counts
"""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from stretto.engine.job import Job
from stretto.engine.replica_sync import SyncState
from stretto.errors import CheckpointError, ForeignCheckpoint, StrettoError, TornCheckpoint
from stretto.flat import Fragments, PartedTensor, Shard, Shares, Slot, original_name
from stretto.optimizer import (
    Piece,
    PieceState,
    StateKinds,
    adopt_states,
    name_of,
    piece_states,
    read_hyperparameters,
)

State = dict[str, Any]


def load_given(job: Job, state: State) -> None:
    """Load a state from the user's program; a checkpoint of Stretto is checked when it is read instead.

    Raises:
        ForeignCheckpoint: It does not fit this job.
    """
    try:
        given = JobState(job)
        if isinstance(state["optimizer"].get("param_groups"), list):
            state = {**state, "optimizer": given.by_name(state["optimizer"])}
        given.load(state)
    except StrettoError:
        raise
    except Exception as error:  # it may be anything
        raise ForeignCheckpoint(
            f"{job.compute.where}: load_state_dict(): expected the result of state_dict() for this model and "
            "optimizer, read by torch.distributed.checkpoint.load; found another state "
            f"({type(error).__name__}: {' '.join(str(error).split())})"
        ) from error


class JobState:
    """Returns a job's state for a checkpoint, and loads one from a checkpoint.

    Note [Aliasing]
        The result of `write` refers to the job's own tensors, like every `state_dict` in PyTorch: save it before
        training continues. The result of `blank` refers to no tensor of the job. Its memory is allocated on the CPU
        when it is read, and nothing in the job changes before `load`.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.slots = job.layout.slots
        self.pieces: dict[int, list[Piece]] = defaultdict(list)
        """This rank's owned pieces of each parameter, by slot index."""
        for piece in job.sharded.pieces:
            self.pieces[piece.slot.index].append(piece)
        everyone = job.everyone.rank, job.everyone.world_size
        self._shares = Shares(job.layout, job.exchange.rank, everyone)
        self._kinds = StateKinds(job.sharded)

    def write(self) -> State:
        """Return the state as nested dictionaries of `PartedTensor`s and numbers; all ranks must call it."""
        sharded = self.job.replica.agreed_optimizer(self.job.model.buffer_sync.changes)
        masters = {
            slot.name: self.cut(slot, sharded.masters)
            for slot in self.slots
            if not self.job.replica.shows_masters(self.job.layout.sets[slot.set_index].dtype)
        }
        return {
            "model": self._model(blank=False),
            **({"master": masters} if masters else {}),
            "optimizer": {**self._states(dict(piece_states(sharded))), **self._hyperparameters()},
            "job": {"step": self.job.compute.rounds.steps, "round_index": self.job.comm.progress.round_index},
        }

    def blank(self, stored: Collection[str]) -> State:
        """Return an empty state to read into: the whole model, and the other entries of `stored` that this job can
        use.

        All ranks must call. `stored` are the names in a checkpoint.
        """
        groups = [f"optimizer.param_groups.{names[0]}." for names in self._group_names()]
        settings = {
            name.removeprefix("optimizer."): None for name in stored if name.startswith(tuple(groups))
        }
        everything: State = {
            "master": {slot.name: self.cut(slot, None) for slot in self.slots},
            "optimizer": {**self._states({}), **settings},
            "job": {"step": 0, "round_index": 0},
        }
        return {
            "model": self._model(blank=True),
            **{
                part: {name: value for name, value in entries.items() if f"{part}.{name}" in stored}
                for part, entries in everything.items()
            },
        }

    def found_in(self, state: State) -> tuple[State, dict[Piece, PieceState]]:
        """Return the model's values and the optimizer's state from the read entries; nothing changes yet.

        Raises:
            TornCheckpoint: A parameter is missing, or a count is not a number.
            ForeignCheckpoint: The optimizer's state is of another kind.
        """
        model = {name: _whole(value) for name, value in state["model"].items()}
        missing = [name for name, value in model.items() if value is None and not is_extra(name)]
        missing += [f"job.{name}" for name, count in state["job"].items() if count is None]
        if missing:
            raise TornCheckpoint(f"{self.job.compute.where}: the checkpoint has no values for {missing}")
        return model, {
            piece: self._piece_state(piece, state["optimizer"]) for piece in self.job.sharded.pieces
        }

    def load(self, state: State) -> None:
        """Replace the job's state by `state`, which was read from a checkpoint; raises as `found_in`."""
        model, states = self.found_in(state)
        for piece in self.job.sharded.pieces:
            values = [_run(state.get(part, {}).get(piece.slot.name), piece) for part in ("master", "model")]
            master = next(value for value in values if value is not None)
            self.job.sharded.values(self.job.sharded.masters, piece).copy_(master)
        adopt_states(self.job.sharded, states)
        self.job.model.load_state_dict(model)
        for name, parameter in self.job.model.model.named_parameters():
            self.job.comm.progress.accept(original_name(name), parameter)
        for group, names in zip(self.job.model.optimizer.param_groups, self._group_names(), strict=True):
            set_settings(group, _under(state["optimizer"], f"param_groups.{names[0]}."))
        self.job.sharded.forget_settings()
        self.job.compute.begin_again(state["job"]["step"], state["job"]["round_index"])
        self.job.exchange.load_residuals([])  # what is owed belongs to the course that ends here

    def cut(self, slot: Slot, buckets: Sequence[Tensor] | None) -> PartedTensor:
        """Return this rank's share of a parameter, from per-bucket masters or sums; None gives a blank tensor."""
        fragments = None
        if buckets is not None:
            pieces = self.pieces[slot.index]
            fragments = [(piece.offset, self.job.sharded.values(buckets, piece)) for piece in pieces]
        return self._cut(slot, self._master_dtype(slot), fragments)

    def spread(self, slot: Slot, values: Tensor | None) -> PartedTensor:
        """Return a value that every rank holds completely and of which each writes its share; None gives a blank
        tensor.
        """
        fragments = None if values is None else [(0, values.detach().reshape(-1))]
        dtype = self.job.sharded.layout.sets[slot.set_index].dtype
        return self._shares.cut(slot, dtype, fragments, everywhere=True)

    def held(self, slot: Slot, values: Tensor | None) -> PartedTensor:
        """Return values of a slot that only this rank writes, as wide as masters; None gives a blank tensor."""
        shard = slot.shard or Shard(slot.shape, 0, slot.shape)
        return self._shares.held(
            shard, self._master_dtype(slot), None if values is None else values.reshape(-1)
        )

    def _cut(self, slot: Slot, dtype: torch.dtype, fragments: Fragments | None) -> PartedTensor:
        return self._shares.cut(slot, dtype, fragments, everywhere=self.job.replica.replicated)

    def _model(self, *, blank: bool) -> State:
        user, compute = self.job.model, self.job.compute
        slots = {id(p): slot for p, slot in zip(user.registered, self.slots, strict=True)}
        shows_it = compute.model.shown == "committed" and compute.model.saved_view is None
        is_shown_anyway = shows_it and self.job.replica.sync.state is SyncState.SYNCED
        with compute.settled(meets=not blank):
            entries: State = {}
            for key, value in user.model.state_dict(keep_vars=True).items():
                name = original_name(key)
                slot = slots.get(id(value))
                if is_extra(name) or not isinstance(value, Tensor):
                    entries[name] = None if blank else value
                elif slot is None:
                    if value.layout is not torch.strided or value.is_nested or value.is_meta:
                        raise CheckpointError(
                            f"{self.job.compute.where}: buffer {name!r} is sparse, nested or on meta: expected a "
                            "buffer that can be saved; register it with persistent=False, or materialise it"
                        )
                    fixed = isinstance(value, nn.Parameter)
                    kept = value if fixed or blank else value.clone()  # later writes change these buffers
                    entries[name] = self._shares.uncut(kept, blank=blank, alike=fixed)
                elif blank:
                    entries[name] = self.spread(slot, None)
                else:
                    shown = user.parameters[slot.index]
                    entries[name] = self.spread(slot, shown if is_shown_anyway else shown.detach().clone())
        return entries

    def _states(self, found: Mapping[Piece, PieceState]) -> State:
        """Return the optimizer's state; entries that `found` lacks are blank."""
        entries: State = {}
        for slot in self.slots:
            pieces = self.pieces[slot.index]
            own = [(piece.offset, found.get(piece, {})) for piece in pieces]
            if not slot.is_whole and not math.prod(slot.whole_shape):
                own = [
                    (0, self._kinds.of(slot))
                ]  # nobody owns a part of it, but plain PyTorch asks for its state
            known = next((state for _, state in own if state), None)
            for key, kind in (known or self._kinds.of(slot)).items() if own else ():
                name = f"state.{slot.name}.{key}"
                values = [(offset, state[key]) for offset, state in own if key in state]
                if not isinstance(kind, Tensor):
                    entries[name] = values[0][1] if values else None
                elif kind.dim() and _is_cut(slot):
                    flat = [(offset, value.reshape(-1)) for offset, value in values]
                    entries[name] = self._cut(slot, kind.dtype, flat or None)
                else:
                    # A copy: parameters of one segment share the number, but may later get different ones.
                    value = values[0][1].clone() if values else None
                    entries[name] = self._shares.whole(slot, kind, value)
        return entries

    def _piece_state(self, piece: Piece, entries: Mapping[str, Any]) -> PieceState:
        found = {}
        kind = self._kinds.of(piece.slot)
        for key, like in kind.items():
            entry = entries.get(f"state.{piece.slot.name}.{key}")
            if not isinstance(like, Tensor):
                found[key] = entry
            elif like.dim() and _is_cut(piece.slot):
                run = _run(entry, piece)
                found[key] = run if run is None or not piece.slot.is_whole else run.view(like.shape)
            else:
                found[key] = None if entry is None else _whole(entry)
        missing = [key for key, value in found.items() if value is None]
        if len(missing) == len(kind):
            return {}
        if missing:
            raise ForeignCheckpoint(
                f"{self.job.compute.where}: the checkpoint's optimizer state of {piece.slot.name!r} has no {missing}, "
                f"which {name_of(self.job.model.optimizer)} keeps: expected the optimizer that was saved"
            )
        return found

    def by_name(self, packed: Mapping[str, Any]) -> State:
        """Return the `state_dict()` of a plain optimizer over the same parameters, by their names."""
        entries: State = {}
        for names, group in zip(self._group_names(), packed["param_groups"], strict=True):
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for name, index in zip(names, group["params"], strict=bool(group["params"])):
                for key, value in packed["state"].get(index, {}).items():
                    entries[f"state.{name}.{key}"] = value
                entries |= {f"param_groups.{name}.{key}": value for key, value in settings.items()}
        return entries

    def _hyperparameters(self) -> State:
        settings = read_hyperparameters(self.job.model.optimizer)
        changes = self.job.sharded.changes() or [{} for _ in settings]
        return {
            f"param_groups.{name}.{key}": value
            for names, group, changed in zip(self._group_names(), settings, changes, strict=True)
            for name in names
            for key, value in {**group, **changed}.items()
        }

    def _group_names(self) -> list[list[str]]:
        """Return the names of the parameters of each group of the user's optimizer, frozen ones included.

        A group without any has settings too, which chained schedulers continue from: it gets its own name.
        """
        user = self.job.model
        names = {id(parameter): original_name(name) for name, parameter in user.model.named_parameters()}
        return [
            [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]
            or [f"(empty group {index})"]
            for index, group in enumerate(user.optimizer.param_groups)
        ]

    def _master_dtype(self, slot: Slot) -> torch.dtype:
        return torch.promote_types(self.job.sharded.layout.sets[slot.set_index].dtype, torch.float32)


def is_extra(name: str) -> bool:
    """Return whether an entry of `model.state_dict()` comes from a module's `get_extra_state`: it may be anything."""
    return name.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def _is_cut(slot: Slot) -> bool:
    """Return whether a moment of the optimizer has the parameter's shape and is divided among owners."""
    return not slot.is_whole or slot.shard is not None


def set_settings(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Set the settings of a parameter group; tensors, which several groups may share, stay the same objects."""
    for key, value in settings.items():
        held = group.get(key)
        if isinstance(held, Tensor) and isinstance(value, Tensor) and held.shape == value.shape:
            held.detach().copy_(value)
        else:
            group[key] = value


def _under(entries: Mapping[str, Any], prefix: str) -> State:
    return {name.removeprefix(prefix): value for name, value in entries.items() if name.startswith(prefix)}


def _run(entry: Tensor | None, piece: Piece) -> Tensor | None:
    """Return the elements of `piece`, or None if the entry does not exist or was not read."""
    start = piece.slot.offset + piece.offset
    if isinstance(entry, PartedTensor):
        return entry.run(start, piece.numel)
    return None if entry is None else entry.detach().reshape(-1)[start : start + piece.numel]


def _whole(entry: Any) -> Any:
    """Return the value of an entry, in its own shape; None for a tensor that was not read."""
    return entry.content() if isinstance(entry, PartedTensor) else entry
