"""A small training job whose states can be compared to the bit, and damage that a check plants in its memory."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from stretto import checkpoint
from stretto.engine import Options
from stretto.errors import ConfigError, StrettoError
from stretto.guards import Guard
from stretto.parallel import DataParallel
from stretto.records import Incident, Update
from stretto.strategies import Strategy
from stretto_lab.testing.conformance import difference

Site = Literal["masters", "optimizer state", "shown parameters", "gradient"]
Outcome = Literal["repaired", "reported", "ends the job"]

_BIT = 1 << 22
"""Of every damaged float32 word: the highest bit of the mantissa, so that the value stays finite."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """Bits flipped on one rank behind one update, and what a guard promises about it."""

    site: Site
    """Which tensor: the first of the owner's masters, of its optimizer's state, or of the model's parameters; or the
    gradient that this parameter is given by the next backward pass."""
    outcome: Outcome = "repaired"
    """Promised: the run ends as the clean one, to the bit; or the damage is named only; or the job ends with an
    error."""
    words: int = 1
    """Damaged float32 words, spread evenly over the tensor."""
    rank: int = 1
    """Whose memory; taken modulo the number of ranks."""
    behind: int = 2
    """The update after which it strikes, from 1: momentum exists by then."""

    def strike(self, parallel: DataParallel) -> None:
        """Flip the bits, if this is the rank."""
        if parallel.rank != self.rank % parallel.world_size:
            return
        if self.site == "gradient":
            self._strike_next_gradient(parallel.job.model.parameters[0])
        else:
            self._flip(self._target(parallel))

    def _flip(self, tensor: Tensor) -> None:
        # Through `.data`, because faulty memory does not change a version counter.
        content = tensor.data.view(-1).view(torch.int32)
        content[torch.arange(self.words) * len(content) // self.words] ^= _BIT

    def _strike_next_gradient(self, parameter: Tensor) -> None:
        """Damage the gradient of the next backward pass only; a repeat of that pass gives the right one."""

        def wrong(gradient: Tensor) -> Tensor:
            handle.remove()
            computed = gradient.contiguous().clone()
            self._flip(computed)
            return computed

        handle = parameter.register_hook(wrong)

    def _target(self, parallel: DataParallel) -> Tensor:
        sharded = parallel.job.sharded
        if self.site == "masters":
            return sharded.masters[0]
        if self.site == "shown parameters":
            return parallel.job.model.parameters[0]
        state = sharded.optimizer.state[sharded.segments[0].master]
        for value in state.values():
            if isinstance(value, Tensor) and value.numel() > 1:
                return value
        raise ConfigError(f"{self}: the optimizer has no state to damage; plant it after a later update")


State = list[Tensor]
"""Parameters and floating-point buffers, in the model's order."""

_IN, _HIDDEN, _OUT = 5, 19, 3


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Settings; equal on all ranks."""

    strategy: Strategy
    micro_batches: int
    """Per rank and update."""
    updates: int = 4
    """For which there are micro-batches; the last of them may be committed by `finish`."""
    looks: bool = True
    """Whether to settle and evaluate at every update."""
    guards: tuple[Guard, ...] = ()
    damage: Damage | None = None
    """What happens to its memory."""
    options: Options = dataclasses.field(default_factory=lambda: Options(clip_norm=0.5, bucket_bytes=512))


class Batches:
    """A rank's micro-batches: a position that can be saved, and nothing else."""

    def __init__(self, job: Job, rank: int) -> None:
        self.rank = rank
        self.length = job.micro_batches * job.updates
        self.position = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.position < self.length:
            generator = torch.Generator().manual_seed(10_000 * self.rank + self.position)
            self.position += 1
            yield torch.randn(4, _IN, generator=generator), torch.randn(4, _OUT, generator=generator)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@dataclasses.dataclass(slots=True)
class Course:
    """What one rank saw of a job."""

    shown: list[State] = dataclasses.field(default_factory=list)
    """States after every micro-batch."""
    committed: list[State] = dataclasses.field(default_factory=list)
    """Committed states at every update that was returned in time."""
    returned: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """How many micro-batches had been counted when an update was returned, and its step."""
    records: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """What every update reported, but for times, bytes and incidents."""
    incidents: list[Incident] = dataclasses.field(default_factory=list)
    """What guards have found."""
    ended_by: str | None = None
    """The error that ended a damaged job early."""
    final: State = dataclasses.field(default_factory=list)
    """State after `finish`."""

    def after(self, step: int) -> "Course":
        """Return the part of the course after update `step`, which was returned in time."""
        moments = [moment for moment, number in self.returned if number <= step]
        begin = moments[-1] if moments else 0
        return Course(
            shown=self.shown[begin:],
            committed=self.committed[step:],
            records=self.records[step:],
            final=self.final,
            returned=self.returned,
        )


_APART = ("seconds", "lane_seconds", "exposed_seconds", "sent_bytes", "incidents")


class Training:
    """One rank's share of a job."""

    def __init__(self, job: Job, rank: int, group: dist.ProcessGroup) -> None:
        torch.manual_seed(7)
        self.job = job
        self.model = nn.Sequential(
            nn.Linear(_IN, _HIDDEN),
            nn.BatchNorm1d(_HIDDEN),
            nn.Tanh(),
            nn.Dropout(0.2),
            nn.Linear(_HIDDEN, _OUT),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, weight_decay=0.1, foreach=True)
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1 / (1 + 0.3 * step))
        self.batches = Batches(job, rank)
        self.parallel = DataParallel(
            self.model,
            self.optimizer,
            job.strategy,
            micro_batches=job.micro_batches,
            group=group,
            guards=job.guards,
            options=job.options,
        )
        torch.manual_seed(100 + rank)  # ranks differ, as they do in real jobs
        self.course = Course()

    def train(self, directory: Path | None = None) -> Course:
        """Train to the end; where a directory is given, save at the start and after every update, each apart."""
        with self.parallel:
            if directory is not None:
                self._save(directory / "0")
            for batch in self.batches:
                update = self.parallel.micro_batch(self._loss, batch, weight=1.0 + 0.25 * self.parallel.rank)
                self.course.shown.append(self._state())
                if update is None:
                    continue
                self._note(update)
                self.course.returned.append((len(self.course.shown), update.step))
                self.scheduler.step()
                if self.job.looks:
                    self._look()
                if directory is not None:
                    self._save(directory / f"{update.step}")
                if self.job.damage is not None and update.step == self.job.damage.behind:
                    self.job.damage.strike(self.parallel)
            for update in self.parallel.finish():
                self._note(update)
        self.course.final = self._state()
        return self.course

    def resume(self, directory: Path) -> Course:
        """Go on from a checkpoint, to the end."""
        restored = checkpoint.load(self.parallel, directory, loader=self.batches)
        self.scheduler.load_state_dict(restored.extra)
        return self.train()

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        outputs: Tensor = self.model(inputs)
        return (outputs - targets).square().mean()

    def _save(self, directory: Path) -> None:
        checkpoint.save(self.parallel, directory, loader=self.batches, extra=self.scheduler.state_dict())

    def _note(self, update: Update) -> None:
        self.course.incidents += update.incidents
        fields = update.as_json()
        self.course.records.append({name: fields[name] for name in fields if name not in _APART})

    def _look(self) -> None:
        with self.parallel.settled():
            self.course.committed.append(self._state())
            self.model.eval()
            with torch.no_grad():
                self.model(torch.ones(2, _IN))
            self.model.train()

    def _state(self) -> State:
        values = [*self.model.parameters(), *self.model.buffers()]
        return [value.detach().clone() for value in values if value.is_floating_point()]


def train(job: Job, rank: int, group: dist.ProcessGroup) -> Course:
    """Run the job on this rank; an error that ends a damaged job is noted."""
    training = Training(job, rank, group)
    try:
        return training.train()
    except StrettoError as error:
        if job.damage is None:
            raise
        training.course.ended_by = f"{type(error).__name__}: {error}"
        return training.course


def saved_and_resumed(job: Job, directory: str, rank: int, group: dist.ProcessGroup) -> list[str]:
    """Save after every update and resume there; return how that differs from never having stopped."""
    place = Path(directory, f"{group.size()}")
    straight = train(job, rank, group)
    saving = Training(job, rank, group).train(place)
    findings = different_courses("the run saved after every update", straight, saving)
    for step in range(len(straight.committed)):
        resumed = Training(job, rank, group).resume(place / f"{step}")
        findings += different_courses(f"the run resumed after update {step}", straight.after(step), resumed)
    return findings


def different_courses(what: str, expected: Course, found: Course) -> list[str]:
    """Return what distinguishes two courses of one rank, the first moment of each kind."""
    findings = []
    for name in ("shown", "committed"):
        findings += _different_states(f"{what}, state {name}", getattr(expected, name), getattr(found, name))
    findings += _different_states(f"{what}, state after finish", [expected.final], [found.final])
    for ours, theirs in zip(expected.records, found.records, strict=True):
        unlike = {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]}
        if unlike:
            findings.append(f"{what}, record of update {ours['step']}: (expected, found) {unlike}")
            break
    return findings


def _different_states(what: str, expected: list[State], found: list[State]) -> list[str]:
    if len(expected) != len(found):
        return [f"{what}: expected {len(expected)} moments, found {len(found)}"]
    for moment, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
        for index, (left, right) in enumerate(zip(ours, theirs, strict=True)):
            if unlike := difference(f"{what}, moment {moment}, tensor {index}", left, right):
                return unlike
    return []
