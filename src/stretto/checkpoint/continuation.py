"""The state that a bit-identical continuation needs in addition to the portable state of `stretto.engine.state`.

    carry.<name>         the carry: sums of the gradients that were accumulated for the next round, reduced now
    job.round_report     its weights, losses and counts by rank
    shown.<name>         the prediction that the model shows, for strategies that leave one at an update's end
    rank.<rank>          random states, buffers as this rank has them, and counts; a prediction of its own
    owed.<rank>          rounding errors that this rank has yet to send, where the wire packs gradients or has done so
    replica.<rank>       parameters, optimizer state and totals of this rank, where replicas differ; the name also says
                         which ranks hold the same one, where workers are nodes
    scheduler            state of the scheduler that the library turns
    loader.<rank>        state of this rank's loader
    pass.<rank>          where its pass over the loader is, if it was saved in one
    extra                whatever the user gave

The carry and the prediction can be used by any number of ranks, but not by another strategy. Rounding errors are dealt
to the ranks that there are, so that none is lost. A replica can be used only
by the same rank of the same worker and layout; otherwise ranks begin with the mean of all replicas.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from stretto.checkpoint.pieces import Whole
from stretto.engine.accumulation import GradientBuffer
from stretto.engine.report import RankReport, RoundReport, Totals, Vote
from stretto.engine.round import Reduction
from stretto.engine.state import JobState, State, is_extra
from stretto.engine.statistics import at, is_same
from stretto.flat import original_name
from stretto.packed import pack, unpack
from stretto.parallel import DataParallel
from stretto.random_states import random_states, restore_random_states

_TOTALS = tuple(field.name for field in dataclasses.fields(Totals))


class Loader(Protocol):
    """A loader whose position can be saved."""

    def state_dict(self) -> Any:
        """Return this rank's position."""
        ...

    def load_state_dict(self, state: Any, /) -> None:
        """Go to the position that `state_dict` returned."""
        ...


class Continuation:
    """Returns all of a job's state that the next process needs, and loads it there."""

    def __init__(self, parallel: DataParallel) -> None:
        job = self._job = parallel.job
        self._feeding, self._scheduler = parallel.feeding, parallel.scheduler
        self._state = JobState(job)
        self._rank = job.exchange.rank
        self._world_size = job.exchange.world_size
        self._device = job.sharded.masters[0].device

    def write(self) -> State:
        """Return the state that ranks hold together; all ranks must call.

        This performs the next reduction now, and the running job goes on with the result.
        """
        compute = self._job.compute
        reduction = compute.reduce_ahead() if compute.has_round_ready else None
        state = self._state.write()
        for part in ("model", "optimizer"):
            state[part] = {name: _as_one(name, value) for name, value in state[part].items()}
        slots = self._state.slots
        if reduction is not None:
            state["carry"] = {slot.name: self._state.cut(slot, reduction.gradient.sums) for slot in slots}
            state["job"]["round_report"] = pack(self._describe(reduction), "the round report")
        if compute.model.shown == "estimate" and not self._job.replica.shows_own:
            state["shown"] = {
                slot.name: self._state.spread(slot, parameter)
                for slot, parameter in zip(slots, self._job.model.parameters, strict=True)
            }
        return state

    def write_own(self, state: State, loader: Loader | None, extra: Any) -> State:
        """Return the state of this rank alone; `state` is what `write` has returned."""
        mine = {
            "random": random_states(self._device),
            "buffers": self._buffers(state["model"]),
        }
        if self._job.compute.model.shown == "estimate" and self._job.replica.shows_own:
            parameters = zip(self._state.slots, self._job.model.parameters, strict=True)
            mine["shown"] = {slot.name: parameter.detach().clone() for slot, parameter in parameters}
        replicas = self._job.replica.state_dict()
        replica = replicas.pop("replica", None)
        rank = str(self._rank)
        own: State = {"rank": {rank: pack({**mine, "replicas": replicas}, f"the state of rank {rank}")}}
        if (feedback := self._job.exchange.feedback) is not None:
            own["owed"] = {rank: pack(feedback.state_dict(), f"what rank {rank} owes")}
        if replica is not None:
            agreed = self._job.model.statistics.agreed
            packed = pack({"replica": replica, "agreed": agreed}, f"the replica of rank {rank}")
            own["replica"] = {self._job.replica.name: packed}
        if loader is not None:
            own["loader"] = {rank: pack(self._feeding.state_of(loader), "the loader's state")}
            if (state_of_pass := self._feeding.pass_state()) is not None:
                own["pass"] = {rank: pack(state_of_pass, "the pass under way")}
        if self._rank == 0:
            own["extra"] = pack(extra, "extra")
            if self._scheduler is not None:
                own["scheduler"] = pack(self._scheduler.state_dict(), "the scheduler's state")
        return own

    def blank(
        self, stored: Collection[str], world_size: int, *, same_strategy: bool, same_layout: bool
    ) -> State:
        """Return what this rank can read of a checkpoint; all ranks must call.

        Args:
            stored: The names in it.
            world_size: How many ranks wrote it.
            same_strategy: Whether this job can use the carry and the prediction.
            same_layout: Whether this job can use the replicas.
        """
        state = self._state.blank(stored)
        slots = self._state.slots
        if same_strategy and all(f"carry.{slot.name}" in stored for slot in slots):
            state["carry"] = {slot.name: self._state.cut(slot, None) for slot in slots}
            state["job"]["round_report"] = b""
        if same_strategy and all(f"shown.{slot.name}" in stored for slot in slots):
            state["shown"] = {slot.name: self._state.spread(slot, None) for slot in slots}
        if world_size == self._world_size:
            state["rank"] = {str(self._rank): b""}
            if f"pass.{self._rank}" in stored:
                state["pass"] = {str(self._rank): b""}
        owing = [rank for rank in range(self._rank, world_size, self._world_size) if f"owed.{rank}" in stored]
        if owing:
            state["owed"] = {str(rank): b"" for rank in owing}
        if same_strategy and same_layout and f"replica.{self._job.replica.name}" in stored:
            state["replica"] = {self._job.replica.name: b""}
        loaders = sorted(
            int(rank)
            for part, _, rank in (name.partition(".") for name in stored)
            if part == "loader" and rank.isdecimal()
        )
        if loaders:
            state["loader"] = {str(rank): b"" for rank in loaders}
        state["extra"] = b""
        if self._scheduler is not None and "scheduler" in stored:
            state["scheduler"] = b""
        return state

    def load(self, state: State, *, goes_on: bool) -> None:
        """Replace the job's state by `state`, which was read from a checkpoint.

        Args:
            state: What was read.
            goes_on: Whether this rank's loader has been told its position.
        """
        self._state.load(state)
        compute = self._job.compute
        mine = unpack(state["rank"][str(self._rank)], "the rank's state") if "rank" in state else None
        if mine is not None:
            buffers = _named_buffers(self._job.model.model)
            for name, value in mine["buffers"].items():
                buffers[name].copy_(value)
        self._job.exchange.owe([unpack(owed, "what a rank owes") for owed in state.get("owed", {}).values()])
        replicas = {} if mine is None else mine["replicas"]
        if "replica" in state:
            replica = unpack(state["replica"][self._job.replica.name], "the replica")
            self._job.replica.load_state_dict({**replicas, "replica": replica["replica"]})
            values = GradientBuffer(self._job.layout)
            self._job.sharded.publish(values.flats)
            compute.model.show(values.views, "committed")
            compute.statistics.agreed = [at(value, self._device) for value in replica["agreed"]]
            compute.statistics.go_on_from_live()
        elif replicas:
            self._job.replica.load_state_dict(replicas)
        if "carry" in state:
            compute.close_round().reduction = self._reduction(state)
            if mine is not None and "shown" in mine:
                own = [mine["shown"][slot.name].to(self._device) for slot in self._state.slots]
                compute.model.show(own, "estimate")
        if "shown" in state:
            shown = [(state["shown"][slot.name].content(), slot.shape) for slot in self._state.slots]
            compute.model.show([content.view(shape).to(self._device) for content, shape in shown], "estimate")
        if "scheduler" in state:
            self._scheduler.load_state_dict(unpack(state["scheduler"], "the scheduler's state"))
        if mine is not None:
            restore_random_states(mine["random"], self._device)
        rest = state.get("pass", {}).get(str(self._rank)) if goes_on else None
        self._feeding.go_on(None if rest is None else unpack(rest, "the pass under way"))
        compute.began_again()

    def _describe(self, reduction: Reduction) -> dict[str, Any]:
        names = [slot.name for slot in self._state.slots]
        records = []
        for record in reduction.report.records:
            fields = {
                field: record[field].item() for field in (*_TOTALS, "norm_squared", "gradient_is_finite")
            }
            fields["used"] = [name for name, flag in zip(names, record["used"], strict=True) if flag]
            records.append(fields)
        buffers = self._job.model.statistics.names
        statistics = {buffers[index]: mean for index, mean in reduction.statistics.items()}
        return {"records": records, "skipped": reduction.skipped, "statistics": statistics}

    def _reduction(self, state: State) -> Reduction:
        described = unpack(state["job"]["round_report"], "the round report")
        sharded = self._job.sharded
        sums = sharded.new_sums()
        for piece in sharded.pieces:
            entry = state["carry"][piece.slot.name]
            sharded.values(sums, piece).copy_(entry.content(piece.offset, piece.numel))
        names = [slot.name for slot in self._state.slots]
        buffers = self._job.model.statistics.names
        records = [
            RoundReport.pack(_rank_report(members, names, len(buffers)))
            for members in self._deal(described["records"])
        ]
        means = described["statistics"].items()
        statistics = {buffers.index(name): at(mean, self._device) for name, mean in means}
        report = RoundReport.unpack(records, len(names), len(buffers))
        return self._job.replica.reduction(sums, report, statistics, skipped=described["skipped"])

    def _deal(self, records: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
        """Deal the saved ranks' records to the running ranks in turn."""
        return [list(records[rank :: self._world_size]) for rank in range(self._world_size)]

    def _buffers(self, saved: Collection[str]) -> dict[str, Tensor]:
        """Return this rank's persistent buffers, except for those that equal what all ranks save together."""
        statistics = self._job.model.statistics
        # Ranks that step alone save the mean of what they have.
        is_mean = self._job.replica.steps_alone
        agreed = {} if is_mean else dict(zip(statistics.names, statistics.agreed, strict=True))
        return {
            name: buffer.detach().clone()
            for name, buffer in _named_buffers(self._job.model.model).items()
            if name in saved and not (name in agreed and is_same(buffer, agreed[name]))
        }


def _as_one(name: str, value: Any) -> Any:
    """Return the value of an entry that may be anything, in any job that loads it, as one object."""
    return Whole(value) if is_extra(name) or name.startswith("param_groups.") else value


def _named_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {original_name(name): buffer for name, buffer in model.named_buffers()}


def _rank_report(records: Sequence[Mapping[str, Any]], names: Sequence[str], num_buffers: int) -> RankReport:
    """Combine the saved reports of several ranks into one; the result is empty if there are none."""
    used = {name for record in records for name in record["used"]}
    return RankReport(
        totals=Totals(**{field: sum(record[field] for record in records) for field in _TOTALS}),
        gradient_is_finite=all(record["gradient_is_finite"] for record in records),
        norm_squared=sum(record["norm_squared"] for record in records),
        vote=Vote.GO_ON,  # votes in the old job do not count in the new one
        settings=0,
        used=bytes(name in used for name in names),
        changed=bytes(num_buffers),
    )
