"""What a bit-identical continuation needs beside the portable state of `stretto.engine.state`.

    carry.<name>         the carry: sums of the gradients that were accumulated for the next round, reduced now
    job.roll_call        its weights, losses and counts by rank
    shown.<name>         the prediction that the model shows, for strategies that leave one at an update's end
    rank.<rank>          random states, buffers as this rank has them, and what its wire still owes
    replica.<rank>       parameters, optimizer state and weights of this rank, where ranks step alone and differ
    loader.<rank>        state of this rank's loader
    extra                whatever the user gave

The carry and the prediction mean the same to any number of ranks, and nothing to another strategy. A replica means
something to the same rank of the same layout only; the others begin with the mean of all.
"""

import io
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from stretto.engine.compute_lane import ComputeLane
from stretto.engine.job import Reduction
from stretto.engine.replicas import Replica
from stretto.engine.roll_call import Attendance, RollCall, Vote
from stretto.engine.state import JobState, State
from stretto.flat import GradientBuffer
from stretto.randomness import random_states, restore_random_states

_ADDED = ("weight", "samples", "micro_batches", "loss_sum", "loss_weight", "norm_squared")
"""Fields of a roll call that are sums over what a rank has contributed or owns."""


class Loader(Protocol):
    """A loader whose position can be saved."""

    def state_dict(self) -> Any:
        """Return this rank's position."""
        ...

    def load_state_dict(self, state: Any, /) -> None:
        """Go there."""
        ...


class Continuation:
    """Writes down all of a job that the next process needs, and puts it in place."""

    def __init__(self, compute: ComputeLane) -> None:
        self._compute = compute
        self._job = JobState(compute)
        self._rank = compute.lane.exchange.rank
        self._world_size = compute.lane.exchange.world_size
        self._device = compute.lane.owner.masters[0].device

    def write(self) -> State:
        """Return what ranks hold together; all ranks must call.

        The reduction that this performs ahead is the one that the running job goes on with.
        """
        reduction = self._compute.reduce_ahead() if self._compute.has_round_ready else None
        state = self._job.write()
        slots = self._job.slots
        if reduction is not None:
            state["carry"] = {slot.name: self._job.cut(slot, reduction.gradient.sums) for slot in slots}
            state["job"]["roll_call"] = pack(self._describe(reduction))
        if self._compute.shown == "estimate":
            parameters = self._compute.guarded.parameters
            state["shown"] = {
                slot.name: self._job.spread(slot, parameter)
                for slot, parameter in zip(slots, parameters, strict=True)
            }
        return state

    def write_own(self, state: State, loader: Loader | None, extra: Any) -> State:
        """Return what is this rank's alone, beside the `state` that `write` has returned."""
        mine = {
            "random": random_states(self._device),
            "buffers": self._buffers(state["model"]),
            "owed": self._compute.lane.exchange.owed,
        }
        if self._compute.lane.copies is not None:
            mine["copies"] = self._compute.lane.copies.counts()
        own: State = {"rank": {str(self._rank): pack(mine)}}
        replicas = self._compute.lane.apart
        if replicas is not None:
            agreed = self._compute.statistics.agreed
            own["replica"] = {str(self._rank): pack({"replica": replicas.write(), "agreed": agreed})}
        if loader is not None:
            own["loader"] = {str(self._rank): pack(loader.state_dict())}
        if self._rank == 0:
            own["extra"] = pack(extra)
        return own

    def blank(
        self, stored: Collection[str], world_size: int, *, same_strategy: bool, same_layout: bool
    ) -> State:
        """Return what this rank can read of a checkpoint; all ranks must call.

        Args:
            stored: The names in it.
            world_size: How many ranks wrote it.
            same_strategy: Whether the carry and the prediction mean anything here.
            same_layout: Whether a rank's replica does, too.
        """
        state = self._job.blank(stored)
        slots = self._job.slots
        if same_strategy and all(f"carry.{slot.name}" in stored for slot in slots):
            state["carry"] = {slot.name: self._job.cut(slot, None) for slot in slots}
            state["job"]["roll_call"] = b""
        if same_strategy and all(f"shown.{slot.name}" in stored for slot in slots):
            state["shown"] = {slot.name: self._job.spread(slot, None) for slot in slots}
        if world_size == self._world_size:
            state["rank"] = {str(self._rank): b""}
        if same_strategy and same_layout and f"replica.{self._rank}" in stored:
            state["replica"] = {str(self._rank): b""}
        loaders = {str(rank): b"" for rank in range(world_size) if f"loader.{rank}" in stored}
        if loaders:
            state["loader"] = loaders
        state["extra"] = b""
        return state

    def load(self, state: State) -> None:
        """Put `state`, read from a checkpoint, in the place of the job's own."""
        self._job.load(state)
        mine = unpack(state["rank"][str(self._rank)]) if "rank" in state else None
        if mine is not None:
            buffers = dict(self._compute.guarded.model.named_buffers())
            for name, value in mine["buffers"].items():
                buffers[name].copy_(value)
        self._compute.lane.exchange.owe([] if mine is None else mine.get("owed", []))
        if "replica" in state:
            self._adopt_replica(**unpack(state["replica"][str(self._rank)]))
        if self._compute.lane.copies is not None and mine is not None and "copies" in mine:
            self._compute.lane.copies.take_up(mine["copies"])
        if "carry" in state:
            self._compute.adopt(self._reduction(state))
        if "shown" in state:
            shown = [(state["shown"][slot.name].content(), slot.shape) for slot in self._job.slots]
            values = [content.view(shape).to(self._device) for content, shape in shown]
            self._compute.show(values, "estimate")
        if mine is not None:
            restore_random_states(mine["random"], self._device)

    def _adopt_replica(self, replica: Replica, agreed: list[Tensor]) -> None:
        lane = self._compute.lane
        replicas = lane.copies or lane.replicas
        if replicas is None:
            raise TypeError("a replica of its own belongs to a strategy that averages")
        replicas.adopt(replica)
        values = GradientBuffer(lane.owner.layout)
        lane.owner.publish(values.flats)
        self._compute.show(values.views, "committed")
        self._compute.statistics.agreed = [value.to(self._device) for value in agreed]

    def _describe(self, reduction: Reduction) -> dict[str, Any]:
        names = [slot.name for slot in self._job.slots]
        records = []
        for record in reduction.call.records:
            fields = {field: record[field].item() for field in (*_ADDED, "gradient_is_finite")}
            fields["used"] = [name for name, flag in zip(names, record["used"], strict=True) if flag]
            records.append(fields)
        statistics = {self._compute.statistics.names[i]: mean for i, mean in reduction.statistics.items()}
        return {"records": records, "skipped": reduction.skipped, "statistics": statistics}

    def _reduction(self, state: State) -> Reduction:
        described = unpack(state["job"]["roll_call"])
        owner, lane = self._compute.lane.owner, self._compute.lane
        sums = owner.new_sums()
        for piece in owner.pieces:
            entry = state["carry"][piece.slot.name]
            owner.values(sums, piece).copy_(entry.content(piece.offset, piece.numel))
        names = [slot.name for slot in self._job.slots]
        buffers = self._compute.statistics.names
        records = [
            RollCall.pack(_attendance(members, names, len(buffers)))
            for members in self._deal(described["records"])
        ]
        means = described["statistics"].items()
        statistics = {buffers.index(name): mean.to(self._device) for name, mean in means}
        call = RollCall.unpack(records, len(names), len(buffers))
        return lane.reduction(sums, call, statistics, skipped=described["skipped"])

    def _deal(self, records: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
        """Deal the saved ranks' records to the running ranks in turn."""
        return [list(records[rank :: self._world_size]) for rank in range(self._world_size)]

    def _buffers(self, saved: Collection[str]) -> dict[str, Tensor]:
        """Return this rank's persistent buffers, but for those that are what ranks agree on."""
        statistics = self._compute.statistics
        agreed = dict(zip(statistics.names, statistics.agreed, strict=True))
        return {
            name: buffer.detach().clone()
            for name, buffer in self._compute.guarded.model.named_buffers()
            if name in saved and not (name in agreed and torch.equal(buffer, agreed[name]))
        }


def pack(value: Any) -> bytes:
    """Return any picklable value as bytes: PyTorch would take a dictionary apart."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def unpack(packed: bytes) -> Any:
    """Return what `pack` was given; only for checkpoints one trusts, as everything that is unpickled."""
    return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=False)


def _attendance(records: Sequence[Mapping[str, Any]], names: Sequence[str], num_buffers: int) -> Attendance:
    """Return one rank's record in the place of several; empty for a rank that takes over nobody's."""
    used = {name for record in records for name in record["used"]}
    return Attendance(
        **{field: sum(record[field] for record in records) for field in _ADDED},
        gradient_is_finite=all(record["gradient_is_finite"] for record in records),
        vote=Vote.GO_ON,  # what ranks wanted of the old job is nothing to the new one
        settings=0,
        used=bytes(name in used for name in names),
        changed=bytes(num_buffers),
    )
