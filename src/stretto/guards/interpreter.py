"""Performs the guards' effects, and keeps incidents until an update reports them."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import get_args

import torch
from torch import Tensor

from stretto.checksums import digests, on_host
from stretto.engine.replica import Performer, Replica
from stretto.engine.round import Round
from stretto.exchange import Exchange
from stretto.flat import shard_of
from stretto.guards.contract import (
    Clear,
    Copy,
    Difference,
    Fingerprint,
    Guard,
    GuardScript,
    Inspect,
    Mend,
    Part,
    Publish,
    Ranks,
    Recompute,
    Replace,
    Report,
    Seal,
    Sealable,
    Share,
    Where,
)
from stretto.guards.mending import SHOWN, Mending
from stretto.guards.seals import Seals
from stretto.guards.strikes import Strikes
from stretto.guards.weave import Arrived, Conclude, Forget, Moment
from stretto.optimizer import ReducedGradient
from stretto.records import Incident


class GuardInterpreter:
    """Performs the effects of one rank's guards, on its communication lane.

    Args:
        guards: The job's guards; empty if only a verified exchange reports incidents.
        replica: This rank's replica. Replicas that may differ are compared only right after an average.
        fixed: Names and tensors of the model that no code may write.
        strikes: Counts the incidents.
        has_copies: Whether other ranks hold the same masters and state, to replace damaged ones.
    """

    def __init__(
        self,
        guards: Sequence[Guard],
        replica: Replica,
        *,
        fixed: Sequence[tuple[str, Tensor]],
        strikes: Strikes,
        has_copies: bool,
    ) -> None:
        self.guards = tuple(guards)
        self._exchange = replica.exchange
        self._is_replicated = replica.replicated
        self._sharded = replica.sharded
        self._progress = replica.progress
        self._replica = replica
        self._node_group = replica.node_group
        self._fixed = {Part("fixed", name): tensor for name, tensor in fixed}
        # This rank's part of each fixed tensor.
        self._held = {part: shard_of(tensor)[0] for part, tensor in self._fixed.items()}
        self.strikes = strikes
        # Incidents on this rank since the end of the last update.
        self._found: list[Incident] = []
        # Reduced gradients that no step has used yet.
        self._gradients: list[ReducedGradient] = []
        self._seals = Seals()
        self._has_copies = has_copies
        self._mending = Mending(replica, self._seals, self._fixed, self._where)
        # Whether a fixed tensor is known to be unchanged, by a guard that watches those (`ShownValues`).
        self._is_as_sealed: Callable[[str], bool] = lambda _: False

    def ask_seals(self, is_as_sealed: Callable[[str], bool]) -> None:
        """Set the function of a guard that watches fixed tensors and knows which are unchanged."""
        self._is_as_sealed = is_as_sealed

    @property
    def performers(self) -> Mapping[type, Performer]:
        """The performer of each kind of effect."""
        return {
            Arrived: self._arrived,
            Forget: lambda effect, _: self.forget(effect.what),
            Conclude: self._conclude,
            Fingerprint: lambda _, round: self._fingerprints(round),
            Share: lambda effect, _: self._exchange.gather_bytes(effect.record),
            Copy: lambda effect, round: self._mending.copy(
                effect.part, dict(self._parts(round))[effect.part], effect.source, effect.onto
            ),
            Seal: lambda effect, round: self._seal(effect.what, round),
            Inspect: lambda effect, _: self._differences(effect.what),
            Mend: lambda effect, _: self._seals.mend(effect.part),
            Replace: lambda effect, _: self._replace(effect.parts),
            Publish: lambda effect, _: self._mending.publish(effect.part),
            Clear: lambda effect, _: self._mending.clear(effect.part),
            Recompute: lambda _, round: self._recomputed(round),
            Where: lambda _, __: self._where(),
            Ranks: lambda _, __: self._exchange.numbers,
            Report: lambda effect, _: self._report(effect),
        }

    def ask(self, moment: Moment) -> GuardScript:
        """Yield the effects of all guards at a moment."""
        has_alike = self._replica.sync.is_synced or (moment == "before_land" and self._replica.has_anchor)
        for guard in self.guards:
            if has_alike or not guard.needs_replicas:
                yield from getattr(guard, moment)()

    def run(self, moment: Moment) -> None:
        """Perform the effects of all guards at a moment; the communication lane must be idle."""
        script, performers, answer = self.ask(moment), self.performers, None
        while True:
            try:
                effect = script.send(answer)
            except StopIteration:
                return
            answer = performers[type(effect)](effect, None)

    def start(self) -> None:
        """Drop all earlier state and let guards start with the current one."""
        self.forget(get_args(Sealable))
        self.run("at_start")

    def forget(self, what: Sequence[Sealable]) -> None:
        """Drop all records of these values, which are about to change or came from a checkpoint."""
        if "state" in what:
            self._gradients.clear()
        self._seals.drop(what)

    def conclude_job(self) -> tuple[Incident, ...]:
        """Return the incidents after the last update: of all ranks, with new incidents that this gather finds here.

        All ranks must call, at rest.
        """
        # A round of the drain that commits nothing has told all ranks its incidents, but no update reports them.
        told = self._progress.take_incidents()
        shared, step = self._gather_found(), self._progress.step + 1
        left = [found for exchange in self._exchanges for found in exchange.incidents]
        return (*told, *shared, *(dataclasses.replace(found, step=step) for found in left))

    def _arrived(self, effect: Arrived, round: Round | None) -> None:
        """Handle a new sum of gradients: check strikes before any step uses it."""
        self.strikes.check(self._progress.step)
        if round is not None:
            self._found.extend(round.incidents)
        self._gradients.append(effect.gradient)

    def _conclude(self, _: Conclude, round: Round | None) -> None:
        """Gather the incidents of all ranks at the end of an update; ranks that step alone wait for their average."""
        if round is not None and round.met:
            self._progress.incidents += self._gather_found()

    def _gather_found(self) -> tuple[Incident, ...]:
        """Return the incidents of all ranks since the last call; all ranks must call."""
        step = self._progress.step + 1
        arrived = [found for exchange in self._exchanges for found in exchange.take_incidents()]
        found, self._found = [*(dataclasses.replace(one, step=step) for one in arrived), *self._found], []
        for exchange in self._exchanges:  # of ranks with the same shard, and what they know, inside the node
            own = json.dumps([one.as_json() for one in found]).encode() if found else b""
            records = [record for record in exchange.gather_records(own) if record]  # in rank order
            found = [Incident.from_json(fields) for record in records for fields in json.loads(record)]
        incidents = tuple(dict.fromkeys(found))
        self.strikes.note(step, incidents)
        return incidents

    @property
    def _exchanges(self) -> tuple[Exchange, ...]:
        """Return all exchanges on which this rank receives from others."""
        return (self._exchange,) if self._node_group is None else (self._exchange, self._node_group.exchange)

    def _report(self, effect: Report) -> None:
        fields = dataclasses.asdict(effect)
        ranks = (self._replica.rank,) if effect.ranks is None else effect.ranks
        self._found.append(Incident(**{**fields, "ranks": ranks, "step": self._progress.step + 1}))

    def _where(self) -> str:
        return f"rank {self._replica.rank}, update {self._progress.step + 1}"

    def _replace(self, parts: Sequence[Part]) -> dict[Part, int]:
        if not self._has_copies:
            # Ranks that share an optimizer hold the same anchors; ranks that step alone do not meet here.
            has_anchors = not self._is_replicated and any(self._replica.anchors(waits=False))
            if lost := [part for part in parts if not (has_anchors and part.site == "anchor")]:
                self._mending.give_up(lost)
            if not has_anchors:
                return {}
        return self._mending.replace(parts, self._differences)

    def _parts(self, round: Round | None) -> Iterator[tuple[Part, Tensor]]:
        """Yield every part that is equal on all ranks, in the same order on all ranks.

        Without a round, the model may be running, and its forward passes may be writing its buffers.
        """
        if self._is_replicated and self._replica.sync.is_synced:
            yield from self._masters()
        for name, anchor in self._replica.anchors(waits=True):
            yield Part("anchor", name), anchor
        if self._replica.sync.is_synced:
            yield from self._shown(round)
        yield from self._held.items() if round is not None else ()

    def _state(self) -> Iterator[tuple[Part, Tensor]]:
        """Yield the tensors that change at a step, and are sealed until then."""
        yield from self._masters()
        for kind, name, tensor in self._replica.outer_state():
            yield Part(kind, name), tensor

    def _masters(self) -> Iterator[tuple[Part, Tensor]]:
        for index, master in enumerate(self._sharded.masters):
            yield Part("masters", f"bucket {index}"), master
        for index, segment in enumerate(self._sharded.segments):
            state = self._sharded.optimizer.state.get(segment.master, {})
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield Part("optimizer state", f"{key} of segment {index}"), value

    def _shown(self, round: Round | None) -> Iterator[tuple[Part, Tensor]]:
        for index, flat in enumerate(round.buffer.flats if round is not None else ()):
            yield Part(SHOWN, f"set {index}"), flat

    def _sums(self) -> Iterator[tuple[Part, Tensor]]:
        for number, gradient in enumerate(self._gradients):
            for index, total in enumerate(gradient.sums):
                yield Part("reduced gradient", f"bucket {index} of round {number}"), total

    def _fingerprints(self, round: Round | None) -> dict[Part, int]:
        # Ranks that keep their own state, or step alone, may also have cut it into different segments.
        agreement = self._replica.sync
        compares_state = agreement.states_are_synced and not agreement.steps_alone
        parts = {
            part: tensor
            for part, tensor in self._parts(round)
            if compares_state or part.site != "optimizer state"
        }
        # Not fixed tensors that somebody has written since the job began.
        versions, fixed = self._progress.versions, self._fixed
        same = {
            part: tensor
            for part, tensor in parts.items()
            if part not in fixed or versions.get(part.name) in (None, fixed[part]._version)
        }
        numbers = on_host(digests(list(same.values())))
        return {**dict.fromkeys(parts, 0), **dict(zip(same, numbers, strict=True))}

    def _recomputed(self, round: Round | None) -> dict[Part, bool]:
        """Return of parts that can be computed again whether the result is the same."""
        # Sealed parts are compared with their seals, values to be shown with the masters that this rank holds whole.
        sealed = [part for part, _ in self._seals.sealed(("values to be shown", "anchor"))]
        changed = {difference.part for difference in self._seals.differences(sealed)}
        shown = dict(self._shown(round)) if self._is_replicated else {}
        flats = [torch.zeros_like(flat) for flat in shown.values()]
        if flats:
            self._sharded.publish(flats)
        numbers = on_host(digests([*flats, *shown.values()]))
        pairs = zip(shown, numbers[: len(flats)], numbers[len(flats) :], strict=True)
        return (
            {part: part not in changed for part in sealed}
            | {part: expected == found for part, expected, found in pairs}
            | {part: self._is_as_sealed(part.name) for part in self._fixed}
        )

    def _seal(self, what: Sealable, round: Round | None) -> None:
        match what:
            case "state":
                self._seals.add(what, self._state())
            case "anchor":
                self._seals.add(
                    what, ((Part(what, name), tensor) for name, tensor in self._replica.anchors(waits=False))
                )
            case "reduced gradient":
                self._seals.add(what, self._sums())
            case "error memory":
                self._seals.drop_written(what)
                parts = [Part(what, f"set {index}") for index in range(len(self._exchange.residuals))]
                self._seals.add(what, zip(parts, self._exchange.residuals, strict=True))
            case "values to be shown":
                self._seals.add(what, self._shown(round))

    def _differences(self, what: Sequence[Sealable]) -> list[Difference]:
        """Return the parts that have changed since they were sealed; segments that were cut again are not compared."""
        # A checkpoint has gradients exchanged outside an update, which changes what the wire owes.
        self._seals.drop_written("error memory")
        state = dict(self._state()) if "state" in what else {}
        return self._seals.differences(
            [
                part
                for part, tensor in self._seals.sealed(what)
                if part.site not in ("masters", "optimizer state") or state.get(part) is tensor
            ]
        )
