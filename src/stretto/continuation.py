"""The state that a bit-identical continuation needs in addition to the portable state of `stretto.engine.state`.

    carry.<name>         the carry: sums of the gradients that were accumulated for the next round, reduced now
    job.round_report     its weights, losses and counts by rank
    job.published        the format in which the committed values that models show were published
    shown.<name>         the prediction that the model shows, for strategies that leave one at an update's end
    rank.<rank>          random states, buffers as this rank has them, and counts
    `owed.<rank>`        the residual: rounding errors that this rank has yet to send, if the wire keeps them
    `debts.<node>.<name>`  the same of a parameter, where the ranks of a node hold shards
    replica.<rank>       parameters, optimizer state and totals of this rank, where replicas differ; the name also says
                         which ranks hold the same, where workers are nodes
    scheduler            state of the scheduler that the library steps
    loader.<rank>        state of this rank's loader
    pass.<rank>          where its pass over its data is, if it was saved in one
    extra                the user's `extra`

The carry and the prediction can be used by any number of ranks, but not by another strategy. Rounding errors are
dealt to the present ranks, so that none is lost. A replica can be used only by the same rank of the same worker and
layout; otherwise ranks begin with the mean of all replicas.
"""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from stretto.engine.accumulation import GradientBuffer, Totals
from stretto.engine.buffer_sync import at, is_same, owner_of
from stretto.engine.buffers import are_alike
from stretto.engine.job import Job
from stretto.engine.options import Options
from stretto.engine.report import RankReport, RoundReport, Vote
from stretto.engine.round import Round
from stretto.engine.state import JobState, State
from stretto.errors import CheckpointError, ConfigError, ForeignCheckpoint, TornCheckpoint
from stretto.feed import Feed
from stretto.feed.again import has_state
from stretto.flat import original_name
from stretto.packed import pack, unpack
from stretto.random_states import read_random_states, restore_random_states, written_random_states

_TOTALS = tuple(field.name for field in dataclasses.fields(Totals))


Loader: TypeAlias = Iterable[Any]
"""A loader whose position can be saved: by its `state_dict` and `load_state_dict`, or by counting its batches."""


def check_loader(loader: object) -> None:
    """Raise unless a loader's position can be saved; None is no loader.

    Raises:
        ConfigError: It has no state and cannot be iterated again.
    """
    begins_again = isinstance(loader, Iterable) and not isinstance(loader, Iterator)
    if loader is not None and not has_state(loader) and (isinstance(loader, type) or not begins_again):
        raise ConfigError(
            f"loader: a {type(loader).__name__} has no state_dict() and load_state_dict(), and cannot begin again: "
            "expected a DataLoader, or another loader whose passes can be repeated; or omit loader=, and data begin "
            "again from the start"
        )


class Continuation:
    """Returns the whole state of a job that the next job needs, and loads it there.

    Args:
        job: This rank's job.
        feeding: This rank's position in its data.
        options: The job's options.
        scheduler: The scheduler that the library steps; None for none, or if the next job has the same scheduler.
    """

    def __init__(self, job: Job, feeding: Feed, options: Options, scheduler: Any) -> None:
        self.job = job
        self._feeding, self._scheduler = feeding, scheduler
        self._published = "masters" if job.replica.replicated else options.changes or options.wire
        self._state = JobState(job)
        self._rank, self._world_size = job.everyone.rank, job.everyone.world_size
        self._device = job.sharded.masters[0].device

    def write(self) -> State:
        """Return the state that ranks hold together; all ranks must call it.

        It performs the next reduction now, and the running job continues with the result.
        """
        compute = self.job.compute
        ready = compute.reduce_early() if compute.has_round_ready else None
        state = self._state.write()
        slots = self._state.slots
        state["job"]["published"] = self._published
        if self._scheduler is not None:
            state["job"]["scheduler"] = _kind_of(self._scheduler)
        if ready is not None:
            state["carry"] = {slot.name: self._state.cut(slot, ready.gradient.sums) for slot in slots}
            state["job"]["round_report"] = pack(self._describe(ready), "the round report")
        if estimate := self._estimate():
            state["shown"] = {
                slot.name: self._state.spread(slot, value)
                for slot, value in zip(slots, estimate, strict=True)
            }
        return state

    def write_own(self, state: State, loader: Loader | None, extra: Any) -> State:
        """Return the state of this rank alone; `state` comes from `write`."""
        mine = {
            "random": written_random_states(self._device),
            "buffers": self._buffers(state["model"]),
            "closed": self.job.compute.written_since_closed(),
            "unsaved": self._feeding.unsaved,
        }
        replicas = self.job.replica.state_dict()
        replica = replicas.pop("replica", None)
        rank = str(self._rank)
        own: State = {"rank": {rank: pack({**mine, "replicas": replicas}, f"the state of rank {rank}")}}
        if (feedback := self.job.exchange.feedback) is not None:
            residuals = feedback.state_dict()
            if self.job.node_group is None:
                own["owed"] = {rank: pack(residuals, f"the residual of rank {rank}")}
            else:
                node = self.job.exchange.rank
                own["debts"] = {
                    f"{node}.{slot.name}": self._state.held(slot, residuals[slot.name])
                    for slot in self._state.slots
                }
        if replica is not None:
            agreed = self.job.model.buffer_sync.agreed
            packed = pack({"replica": replica, "agreed": agreed}, f"the replica of rank {rank}")
            own["replica"] = {self.job.replica.name: packed}
        if loader is not None:
            own["loader"] = {rank: pack(self._feeding.state_of(loader), "the loader's state")}
        if (state_of_pass := self._feeding.pass_state()) is not None:
            own["pass"] = {rank: pack(state_of_pass, "the pass in progress")}
        if self._rank == 0:
            own["extra"] = pack(extra, "extra")
            if self._scheduler is not None and not hasattr(self._scheduler, "state_dict"):
                raise CheckpointError(
                    f"scheduler: a {type(self._scheduler).__name__} has no state_dict() and "
                    "load_state_dict(), so a resumed job could not continue it: give it both"
                )
            if self._scheduler is not None:
                own["scheduler"] = pack(self._scheduler.state_dict(), "the scheduler's state")
        return own

    def blank(
        self, stored: Collection[str], world_size: int, *, same_strategy: bool, same_layout: bool
    ) -> State:
        """Return empty entries for the part of a checkpoint that this rank reads; all ranks must call it.

        Args:
            stored: The names of entries in the checkpoint.
            world_size: How many ranks wrote it.
            same_strategy: Whether this job can use the carry and the prediction.
            same_layout: Whether this job can use the replicas.
        """
        state = self._state.blank(stored)
        slots = self._state.slots
        state["job"]["published"] = ""
        if "job.scheduler" in stored:
            state["job"]["scheduler"] = ""
        if same_strategy and all(f"carry.{slot.name}" in stored for slot in slots):
            state["carry"] = {slot.name: self._state.cut(slot, None) for slot in slots}
            state["job"]["round_report"] = b""
        if same_strategy and all(f"shown.{slot.name}" in stored for slot in slots):
            state["shown"] = {slot.name: self._state.spread(slot, None) for slot in slots}
        if world_size == self._world_size:
            state["rank"] = {str(self._rank): b""}
            if f"pass.{self._rank}" in stored:
                state["pass"] = {str(self._rank): b""}
        state |= self._blank_residuals(stored, world_size)
        if same_strategy and same_layout and f"replica.{self.job.replica.name}" in stored:
            state["replica"] = {self.job.replica.name: b""}
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

    def check(self, state: State) -> None:
        """Raise unless the saved state has this job's kinds of optimizer and scheduler; nothing has changed yet.

        Raises:
            ForeignCheckpoint: The kinds differ; the message names both.
            TornCheckpoint: An entry is missing.
        """
        self._state.found_in(state)
        saved, own = state["job"].get("scheduler"), _kind_of(self._scheduler)
        if self._scheduler is not None and saved not in (None, own):
            raise ForeignCheckpoint(
                f"the checkpoint holds the state of {saved}, expected {own}: build the scheduler that was "
                "saved, or omit scheduler= and step a new scheduler in on_update"
            )

    def unsaved(self, state: State) -> str:
        """Return what only the saved loader could have restored, as `Feed.unsaved`."""
        mine: Mapping[str, Any] = state.get("rank", {}).get(str(self._rank), {})
        return str(mine.get("unsaved", ""))

    def pass_of(self, state: State) -> Mapping[str, Any] | None:
        """Return this rank's saved position in its pass; None if it was in no pass."""
        place: Mapping[str, Any] | None = state.get("pass", {}).get(str(self._rank))
        return place

    def load(self, state: State, *, goes_on: bool) -> None:
        """Replace the job's state by `state`; all ranks must call it.

        The model shows the same values as when the state was saved, or, if this job publishes in another format, the
        masters in that format.

        Args:
            state: The saved state, after `unpack_entries`.
            goes_on: Whether this rank's loader was set to its position.
        """
        rest = self.pass_of(state) if goes_on else None
        self._state.load(state)
        compute = self.job.compute
        self._publish_anew(state["job"])
        mine = state["rank"][str(self._rank)] if "rank" in state else None
        if mine is not None:
            for name, buffer in _named_buffers(self.job.model.model).items():
                value = mine["buffers"].get(name)
                if value is not None and are_alike(value, buffer):
                    buffer.copy_(value)
                elif value is not None:  # batches ahead of the update have given it another shape
                    setattr(*owner_of(self.job.model.model, name), at(value, self._device))
        self.job.exchange.load_residuals(self._residuals(state))
        replicas = {} if mine is None else mine["replicas"]
        if "replica" in state:
            replica = state["replica"][self.job.replica.name]
            self.job.replica.load_state_dict({**replicas, "replica": replica["replica"]})
            values = GradientBuffer(self.job.layout)
            self.job.sharded.publish(values.flats)
            compute.model.show(values.views, "committed")
            compute.buffer_sync.go_on_from([at(value, self._device) for value in replica["agreed"]])
        elif replicas:
            self.job.replica.load_state_dict(replicas)
        if "carry" in state:
            self._carry(compute.close_round(), state, goes_on=rest is not None)
            compute.closed_with({} if mine is None else mine.get("closed", {}))
        if "shown" in state:
            shown = [state["shown"][slot.name].content() for slot in self._state.slots]
            compute.model.show([content.to(self._device) for content in shown], "estimate")
        if "scheduler" in state:
            self._scheduler.load_state_dict(state["scheduler"])
        if mine is not None:
            restore_random_states(read_random_states(mine["random"]), self._device)
        self._feeding.go_on(rest)
        compute.began_again()

    def _blank_residuals(self, stored: Collection[str], world_size: int) -> State:
        """Return empty entries for the residuals that this rank takes over: they are dealt in rotation, so that none
        is lost.
        """
        exchange = self.job.exchange
        if exchange.feedback is None:
            return {}
        # Of what is stored: how many ranks there were is only what the manifest says.
        paths = [path.split(".") for path in stored if path.startswith(("owed.", "debts."))]
        numbers = {int(path[1]) for path in paths if path[1].isdecimal() and len(path[1]) < 10}
        dealt = [
            of for of in sorted(numbers) if of < world_size and of % exchange.world_size == exchange.rank
        ]
        of_ranks = {str(rank): b"" for rank in dealt if f"owed.{rank}" in stored}
        of_nodes = {
            f"{node}.{slot.name}": self._state.held(slot, None)
            for node in dealt
            for slot in self._state.slots
            if f"debts.{node}.{slot.name}" in stored
        }
        return {part: entries for part, entries in (("owed", of_ranks), ("debts", of_nodes)) if entries}

    def _residuals(self, state: State) -> list[dict[str, Tensor]]:
        """Return the residuals of this rank's parameters or shards, for the rank and for its node of shards."""
        slots = {slot.name: slot for slot in self._state.slots}
        found = []
        for residuals in state.get("owed", {}).values():
            found.append(
                {
                    name: value.reshape(-1)[slots[name].offset :][: slots[name].numel].view(slots[name].shape)
                    for name, value in residuals.items()
                    if name in slots
                }
            )
        for key, entry in state.get("debts", {}).items():
            found.append({key.partition(".")[2]: entry.content()})
        return found

    def _publish_anew(self, saved: Mapping[str, Any]) -> None:
        """Show the masters as this job's owners publish them, if the saving job published in another format."""
        job = self.job
        if saved["published"] == self._published:
            return
        job.replica.models_show(job.model.parameters)
        values = GradientBuffer(job.layout)
        job.replica.gather_committed(values.flats, job.model.buffer_sync)
        job.model.show(values.views, "committed")
        job.model.begin_again()

    def _estimate(self) -> list[Tensor]:
        """Return copies of the estimate with which training continues; empty where that is the committed parameters.

        The model may show committed parameters meanwhile: after the end of `feed`, or inside `settled`.
        """
        model = self.job.compute.model
        with model.unsettled():
            return [one.detach().clone() for one in model.parameters] if model.shown == "estimate" else []

    def _describe(self, round: Round) -> dict[str, Any]:
        names = [slot.name for slot in self._state.slots]
        records = []
        for record, vote in zip(round.report.records, round.report.votes, strict=True):
            fields = {
                field: record[field].item() for field in (*_TOTALS, "norm_squared", "gradient_is_finite")
            }
            fields["is_exhausted"] = vote == Vote.DATA_ENDED
            fields["used"] = [name for name, flag in zip(names, record["used"], strict=True) if flag]
            records.append(fields)
        buffers = self.job.model.buffer_sync.names
        means = {buffers[index]: mean for index, mean in round.buffer_means.items()}
        return {"records": records, "skipped": round.skipped, "statistics": means}

    def _carry(self, round: Round, state: State, *, goes_on: bool) -> None:
        """Give a closed round the result of its exchange, which was saved."""
        described = state["job"]["round_report"]
        sharded = self.job.sharded
        sums = sharded.new_sums()
        for piece in sharded.pieces:
            entry = state["carry"][piece.slot.name]
            sharded.values(sums, piece).copy_(entry.run(piece.slot.offset + piece.offset, piece.numel))
        names = [slot.name for slot in self._state.slots]
        buffers, ranks = self.job.model.buffer_sync.names, self.job.exchange.world_size
        records = [
            _rank_report(members, names, len(buffers), goes_on=goes_on).pack()[0]
            # The saved ranks, or nodes that hold shards, are dealt to the running ones one after another.
            for members in (described["records"][rank::ranks] for rank in range(ranks))
        ]
        means = described["statistics"].items()
        self.job.replica.fill(round, sums, RoundReport.unpack(records, len(names), len(buffers)))
        round.buffer_means = {buffers.index(name): at(mean, self._device) for name, mean in means}
        if described["skipped"]:
            self.job.replica.skip(round)

    def _buffers(self, saved: Collection[str]) -> dict[str, Tensor]:
        """Return this rank's persistent buffers that differ from the commonly saved buffers."""
        buffer_sync = self.job.model.buffer_sync
        # Ranks that step alone save the mean of what they have.
        is_mean = self.job.replica.sync.steps_alone
        agreed = {} if is_mean else dict(zip(buffer_sync.names, buffer_sync.agreed, strict=True))
        return {
            name: buffer.detach().clone()
            for name, buffer in _named_buffers(self.job.model.model).items()
            if name in saved and not (name in agreed and is_same(buffer, agreed[name]))
        }


def unpack_entries(state: State) -> None:
    """Unpack all packed entries in place.

    Raises:
        UnsafeValue: An entry contains an object that only pickle could read.
        TornCheckpoint: An entry of a rank is not a dictionary.
    """
    for into, key, name in places(state):
        # Bytes of the model and the optimizer are the user's own.
        if type(into[key]) is bytes and not name.startswith(("model.", "optimizer.")):
            into[key] = unpack(into[key], repr(name))
            if name.startswith(("rank.", "pass.", "replica.", "owed.")) and not isinstance(into[key], dict):
                raise TornCheckpoint(f"{name!r} is no dictionary; go back to an older checkpoint")


def places(state: State) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield each entry of a state as its container, its key there, and its name."""
    for part, entries in state.items():
        if not isinstance(entries, dict):
            yield state, part, part
            continue
        for key in entries:
            yield entries, key, f"{part}.{key}"


def _kind_of(scheduler: Any) -> str:
    inner = getattr(scheduler, "_schedulers", None) or getattr(scheduler, "members", ())
    return type(scheduler).__name__ + (f"({', '.join(map(_kind_of, inner))})" if inner else "")


def _named_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {original_name(name): buffer for name, buffer in model.named_buffers()}


def _rank_report(
    records: Sequence[Mapping[str, Any]], names: Sequence[str], num_buffers: int, *, goes_on: bool
) -> RankReport:
    """Combine the saved reports of several ranks into one; the result is empty if there are none.

    A rank at the end of its data stays there if its pass continues. Other votes of the old job no longer count.
    """
    is_exhausted = goes_on and any(record["is_exhausted"] for record in records)
    used = {name for record in records for name in record["used"]}
    return RankReport(
        totals=Totals(**{field: sum(record[field] for record in records) for field in _TOTALS}),
        gradient_is_finite=all(record["gradient_is_finite"] for record in records),
        norm_squared=sum(record["norm_squared"] for record in records),
        vote=Vote.DATA_ENDED if is_exhausted else Vote.GO_ON,
        settings=0,
        used=bytes(name in used for name in names),
        changed=bytes(num_buffers),
    )
