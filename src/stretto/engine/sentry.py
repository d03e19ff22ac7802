"""The sentry: performs what guards ask for, and holds what was found until an update reports it."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributed as dist

from stretto.checksums import Checksum, digest
from stretto.engine.agreement import gather_text
from stretto.engine.copies import Copies
from stretto.engine.job import Job
from stretto.engine.replicas import Replicas
from stretto.engine.strikes import Strikes
from stretto.errors import StateCorrupt
from stretto.exchange import Exchange
from stretto.guards import Guard
from stretto.guards.contract import (
    Copy,
    Difference,
    Fingerprint,
    GuardEffect,
    GuardScript,
    Inspect,
    Mend,
    Part,
    Recompute,
    Replace,
    Report,
    Seal,
    Share,
    Where,
)
from stretto.optimizer import MASTER, Hyperparameters, ReducedGradient, ShardedOptimizer
from stretto.records import Incident

SHOWN = "values to be shown"
"""Site of what the model shows next."""
Moment = Literal["at_start", "after_reduce", "before_step", "after_update"]


class Sentry:
    """Answers the guards of one rank, on its communication lane.

    Args:
        guards: Of the job; without any, nothing is computed and nothing travels.
        exchange: Whose ranks.
        owner: Whose masters and optimizer state are watched.
        fixed: By name, what the model holds that nobody is to write.
        strikes: Counts what is found.
        replicated: Whether every rank owns everything.
    """

    def __init__(
        self,
        guards: Sequence[Guard],
        exchange: Exchange,
        owner: ShardedOptimizer,
        fixed: Sequence[tuple[str, Tensor]],
        strikes: Strikes,
        *,
        replicated: bool,
    ) -> None:
        self.guards = tuple(guards)
        self.company: Replicas | Copies | None = None
        """Given by the lane, where replicas may differ: they are compared right after an average, and at no other
        time."""
        self._exchange = exchange
        self._owner = owner
        self._fixed = {Part("fixed", name): tensor for name, tensor in fixed}
        self._versions = {part: tensor._version for part, tensor in self._fixed.items()}
        self._strikes = strikes
        self._replicated = replicated
        self._step = 1
        self._incidents: list[Incident] = []
        self._gradients: list[ReducedGradient] = []
        """Reduced and not yet stepped with."""
        self._checksums: dict[Part, Checksum] = {}
        self._sealed: dict[Part, Tensor] = {}
        """The tensors that were sealed: others may have taken their place."""
        self._rehearsed: list[dict[str, int]] = []
        """What the last step was to leave, by segment, where a guard wants to know."""

    @property
    def watches_shown(self) -> bool:
        """Whether the compute lane is to watch the model's parameters."""
        return any(guard.watches_shown for guard in self.guards)

    @property
    def keeps_rounds(self) -> bool:
        """Whether the compute lane is to keep what it takes to run a round again, where it can."""
        return self.watches_shown or self.needs_rounds

    @property
    def needs_rounds(self) -> bool:
        """Whether it has to."""
        return any(guard.needs_rounds for guard in self.guards)

    def ask(self, moment: Moment) -> GuardScript:
        """Yield what all guards ask for at a moment."""
        is_apart = self.company is not None and self.company.rounds > 0
        for guard in self.guards:
            if not (guard.needs_replicas and is_apart):
                yield from getattr(guard, moment)()

    def start(self, step: int) -> None:
        """Begin with the state as it is, behind `step` updates."""
        self.forget()
        self.run("at_start", None, step + 1)

    def run(self, moment: Moment, job: Job | None, step: int) -> None:
        """Perform what all guards ask for at a moment of the `step`-th update."""
        self._step = step
        script = self.ask(moment)
        answer = None
        while True:
            try:
                effect = script.send(answer)
            except StopIteration:
                return
            answer = self.perform(effect, job)

    def reduced(self, gradient: ReducedGradient, job: Job, step: int) -> None:
        """Take note of a gradient that waits for its step."""
        if self.guards:
            self._gradients.append(gradient)
            self.run("after_reduce", job, step)

    def rehearse(self, gradient: ReducedGradient, hyperparameters: Hyperparameters, clip: float) -> None:
        """Compute ahead what a step is to leave, if a guard wants to compare it with what the step does leave."""
        if any(guard.rehearses_step for guard in self.guards):
            self._rehearsed = self._owner.rehearse(gradient, hyperparameters, clip)

    def forget(self) -> None:
        """Let go of everything that is known of the state: it is about to change, or was put there from outside."""
        self._rehearsed.clear()
        self._gradients.clear()
        self._checksums.clear()
        self._sealed.clear()

    def note(self, incidents: Sequence[Incident]) -> None:
        """Take over what the compute lane has found."""
        self._incidents.extend(incidents)

    def perform(self, effect: GuardEffect, job: Job | None) -> Any:
        """Perform one effect and return its answer."""
        match effect:
            case Share() | Copy() | Replace():
                return self._perform_together(effect, job)
            case Fingerprint():
                return self._fingerprints(job)
            case Seal(what):
                self._seal(what)
            case Inspect():
                return list(self._differences())
            case Mend(part):
                return self._checksums[part].mends(self._sealed[part])
            case Recompute():
                return self._recompute(job)
            case Where():
                return self._where
            case Report():
                fields = dataclasses.asdict(effect)
                ranks = (self._exchange.rank,) if effect.ranks is None else effect.ranks
                self._incidents.append(Incident(**{**fields, "ranks": ranks, "step": self._step}))
        return None

    def _perform_together(self, effect: Share | Copy | Replace, job: Job | None) -> Any:
        """Perform an effect that all ranks ask for at once."""
        match effect:
            case Share(record):
                return self._exchange.gather_bytes(record)
            case Copy(part, source, onto):
                return self._copy(part, dict(self._parts(job))[part], source, onto)
            case Replace(parts):
                return self._replace(parts)

    def conclude(self, step: int) -> tuple[Incident, ...]:
        """Return what was found on any rank since the last call, at the end of the `step`-th update.

        All ranks must call; without guards and without a verified exchange nothing travels.
        """
        if not self.guards and not self._exchange.is_verified:
            return ()
        arrivals = [dataclasses.replace(incident, step=step) for incident in self._exchange.incidents]
        held = [*arrivals, *self._incidents]
        self._exchange.incidents, self._incidents = [], []
        own = json.dumps([incident.as_json() for incident in held]) if held else ""
        texts = [text for text in gather_text(self._exchange, own) if text]
        found = [Incident.from_json(fields) for text in texts for fields in json.loads(text)]
        incidents = tuple(dict.fromkeys(found))
        self._strikes.note(step, incidents)
        return incidents

    def conclude_job(self, step: int) -> tuple[Incident, ...]:
        """Return what was found behind the last update: on any rank, and by this one in the gather that tells so."""
        shared = self.conclude(step)
        return (*shared, *(dataclasses.replace(incident, step=step) for incident in self._exchange.incidents))

    def check_strikes(self, step: int) -> None:
        """Raise `Quarantined`, on all ranks at the same round, if by `step` somebody has been named too often."""
        self._strikes.check(step)

    @property
    def _where(self) -> str:
        return f"rank {self._exchange.rank}, update {self._step}"

    def _parts(self, job: Job | None) -> Iterator[tuple[Part, Tensor]]:
        """Yield everything that ranks of a replicated strategy hold alike, in an order that all share.

        Without a job the model may be running, so that what it holds beside its parameters may be being written.
        """
        yield from self._state()
        for index, flat in enumerate(job.buffer.flats if job is not None else ()):
            yield Part(SHOWN, f"set {index}"), flat
        yield from self._fixed.items() if job is not None else ()

    def _state(self) -> Iterator[tuple[Part, Tensor]]:
        for index, master in enumerate(self._owner.masters):
            yield Part("masters", f"bucket {index}"), master
        for index, segment in enumerate(self._owner.segments):
            state = self._owner.optimizer.state.get(segment.master, {})
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield Part("optimizer state", f"{key} of segment {index}"), value

    def _sums(self) -> Iterator[tuple[Part, Tensor]]:
        for number, gradient in enumerate(self._gradients):
            for index, total in enumerate(gradient.sums):
                yield Part("reduced gradient", f"bucket {index} of round {number}"), total

    def _fingerprints(self, job: Job | None) -> dict[Part, int]:
        # Ranks that keep their own state, or step alone, may have cut it into other segments too.
        company = self.company
        keeps_state = company is not None and not (isinstance(company, Copies) and company.states_are_equal)
        return {
            part: self._fingerprint(part, tensor)
            for part, tensor in self._parts(job)
            if not (keeps_state and part.site == "optimizer state")
        }

    def _fingerprint(self, part: Part, tensor: Tensor) -> int:
        is_written = part in self._versions and self._versions[part] != tensor._version
        return 0 if is_written else digest(tensor)

    def _recompute(self, job: Job | None) -> dict[Part, bool]:
        """Compute again what can be, and say of each part whether it comes out as it is."""
        right: dict[Part, bool] = {}
        for index, (expected, found) in enumerate(zip(self._rehearsed, self._owner.digests(), strict=False)):
            for key in expected.keys() | found.keys():
                part = self._part_of(index, key)
                right[part] = right.get(part, True) and expected.get(key) == found.get(key)
        flats = [torch.zeros_like(flat) for flat in job.buffer.flats] if job is not None else []
        if flats:
            self._owner.publish(flats)
        shown = [tensor for part, tensor in self._parts(job) if part.site == SHOWN]
        for index, (flat, tensor) in enumerate(zip(flats, shown, strict=True)):
            right[Part(SHOWN, f"set {index}")] = digest(flat) == digest(tensor)
        return right

    def _part_of(self, segment: int, key: str) -> Part:
        """Return the part that holds one tensor of a segment's."""
        if key == MASTER:
            return Part("masters", f"bucket {self._owner.segments[segment].bucket}")
        return Part("optimizer state", f"{key} of segment {segment}")

    def _seal(self, what: str) -> None:
        for part, tensor in self._state() if what == "state" else self._sums():
            if part not in self._sealed:
                self._sealed[part], self._checksums[part] = tensor, Checksum.of(tensor)

    def _differences(self) -> Iterator[Difference]:
        """Yield what is not as it was sealed; parts that have been cut anew since are not compared."""
        present = {part: tensor for parts in (self._state(), self._sums()) for part, tensor in parts}
        for part, tensor in self._sealed.items():
            if present.get(part) is tensor:
                expected, found = self._checksums[part].digest, digest(tensor)
                if expected != found:
                    yield Difference(part, expected, found)

    def _replace(self, parts: Sequence[Part]) -> dict[Part, int]:
        """Take this rank's damaged parts from others, and lend others theirs."""
        if not self._replicated:
            self._give_up(parts)
            return {}
        names = json.dumps([dataclasses.astuple(part) for part in parts]) if parts else ""
        damaged = [
            {Part(*fields) for fields in json.loads(text)} if text else set()
            for text in gather_text(self._exchange, names)
        ]
        wanted = sorted(set().union(*damaged), key=str)
        sources = {}
        for part in wanted:
            healthy = [rank for rank, of_rank in enumerate(damaged) if part not in of_rank]
            if not healthy:
                self._give_up([part])
            onto = tuple(rank for rank, of_rank in enumerate(damaged) if part in of_rank)
            sources[part] = healthy[0]
            self._copy(part, self._sealed[part], healthy[0], onto)
        self._give_up([difference.part for difference in self._differences()])
        return sources

    def _give_up(self, parts: Sequence[Part]) -> None:
        if parts:
            raise StateCorrupt(
                f"{self._where}: damaged beyond mending: {'; '.join(map(str, parts))}; expected what the last update "
                "left there, and no other rank holds it undamaged; go on from the last checkpoint",
                ranks=[self._exchange.rank],
            )

    def _copy(self, part: Part, own: Tensor, source: int, onto: tuple[int, ...]) -> None:
        """Broadcast a part as bytes, and keep it where asked."""
        device = self._exchange.layout.sets[0].device
        content = own.detach().contiguous().view(-1).view(torch.uint8).clone().to(device)
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._exchange.wait(self._exchange.group.broadcast([content], options), f"copy of {part}")
        if self._exchange.rank not in onto:
            return
        with torch.no_grad():
            own.copy_(content.to(own.device).view(own.dtype).view(own.shape))
        if part in self._versions:
            self._versions[part] = own._version
