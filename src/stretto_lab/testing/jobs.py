"""One small job with every oddity, and the law that a saved job continues to the bit."""

import dataclasses
import functools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from stretto import checkpoint
from stretto.engine import Options
from stretto.errors import StrettoError
from stretto.guards import Guard
from stretto.parallel import DataParallel
from stretto.records import Incident, Update
from stretto.strategies import Strategy
from stretto_lab.virtual import VirtualCluster

Program = Callable[[int, dist.ProcessGroup], Any]
"""Runs one rank on its group. Picklable, so that a new process can run it."""
RunRanks = Callable[[int, Program], Sequence[Any]]
"""Runs a program on that many ranks, and returns the results in rank order."""


def on_virtual_ranks(world_size: int, program: Program) -> Sequence[Any]:
    """Run a program on virtual ranks, which raise as soon as ranks call different collectives."""
    return VirtualCluster(world_size).run(program).values


def differing(expected: object, found: object, name: str = "") -> list[str]:
    """Return the differences between two values, by their places in lists and dictionaries; tensors must agree in all
    bits.
    """
    if isinstance(expected, list | tuple) and isinstance(found, list | tuple) and len(expected) == len(found):
        expected, found = dict(enumerate(expected)), dict(enumerate(found))
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        keys = {**expected, **found}
        texts = [differing(expected.get(key), found.get(key), f"{name} {key}".strip()) for key in keys]
        return [text for one in texts for text in one]
    if not (isinstance(expected, Tensor) and isinstance(found, Tensor)):
        same = type(expected) is type(found) and expected == found
        return [] if same else [f"{name}: expected {expected!r}, found {found!r}"]
    if (expected.shape, expected.dtype) != (found.shape, found.dtype):
        kinds = [f"{one.dtype} of shape {tuple(one.shape)}" for one in (expected, found)]
        return [f"{name}: expected {kinds[0]}, found {kinds[1]}"]
    # Bytes, one row per element: NaN equals itself, and minus zero is not zero.
    ours, theirs = (one.detach().contiguous().view(-1, 1).view(torch.uint8) for one in (expected, found))
    wrong = (ours != theirs).any(dim=-1).nonzero().flatten().tolist()
    if not wrong:
        return []
    left, right = (one.flatten()[wrong[0]].item() for one in (expected, found))
    where = f"{len(wrong)} of {found.numel()} elements of {found.dtype} differ; at index {wrong[0]}"
    return [f"{name}: {where} expected {left!r}, found {right!r}"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """Bits flipped on one rank after one update, and a guard's promise about them."""

    site: Literal["masters", "optimizer state", "shown parameters", "gradient"]
    """The damaged tensor: the first of the owner's masters, of its optimizer's state or of the model's parameters, or
    that parameter's next gradient."""
    outcome: Literal["repaired", "reported", "ends the job"] = "repaired"
    """The promise: the job ends bit-identical to the clean one; or the damage is only reported; or an error ends the
    job."""
    words: int = 1
    """Number of damaged float32 words, spread evenly over the tensor; and of the rank, modulo the number of ranks."""
    rank: int = 1
    behind: int = 2
    """The update after which the bits flip, counted from 1, when momentum exists."""

    def strike(self, parallel: DataParallel) -> None:
        """Flip the bits if this is the rank."""
        if parallel.rank != self.rank % parallel.world_size:
            return
        sharded, parameter = parallel.job.sharded, parallel.job.model.parameters[0]

        def wrong(gradient: Tensor) -> Tensor:
            handle.remove()  # a repeat of the backward pass gives the right gradient
            return self._flipped(gradient.contiguous().clone())

        if self.site == "gradient":
            handle = parameter.register_hook(wrong)
        elif self.site == "optimizer state":
            state = sharded.optimizer.state[sharded.segments[0].master].values()
            moments = [one for one in state if isinstance(one, Tensor) and one.numel() > 1]
            self._flipped(moments[0])
        else:
            self._flipped(sharded.masters[0] if self.site == "masters" else parameter)

    def _flipped(self, tensor: Tensor) -> Tensor:
        # Through `.data`, because faulty memory does not change a version counter.
        content = tensor.data.view(-1).view(torch.int32)
        # The highest bit of the mantissa: the value stays finite.
        content[torch.arange(self.words) * len(content) // self.words] ^= 1 << 22
        return tensor


class Network(nn.Module):
    """A network with odd shapes, three dimensions, batch norm, dropout, a frozen layer, a shared weight, a branch that
    may not run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(7, 33)
        self.normalise = nn.BatchNorm1d(33)
        self.drop = nn.Dropout(0.25)
        self.mix = nn.Parameter(torch.randn(3, 11, 5) / 8)
        self.branch = nn.Linear(33, 5)
        self.frozen = nn.Linear(33, 33).requires_grad_(False)
        self.back = nn.Linear(33, 7)
        self.again = nn.Linear(33, 7, bias=False)
        self.again.weight = self.back.weight

    def forward(self, inputs: Tensor, uses_branch: bool) -> Tensor:
        hidden = self.drop(self.normalise(self.enter(inputs)).tanh())
        hidden = hidden + torch.einsum("nik,ikj->nij", hidden.view(-1, 3, 11), self.mix).sum((1, 2))[:, None]
        if uses_branch:
            hidden = hidden + self.branch(hidden).sum(1, keepdim=True)
        hidden = hidden + self.frozen(hidden)
        outputs: Tensor = self.back(hidden) + self.again(hidden.sigmoid())
        return outputs


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Settings of a test job; equal on all ranks."""

    strategy: Strategy
    micro_batches: int = 2
    """Micro-batches per rank and update, and the number of updates; `finish` may commit the last one."""
    updates: int = 4
    looks: bool = True
    """Whether to settle and evaluate at every update."""
    guards: tuple[Guard, ...] = ()
    damage: Damage | None = None
    optimizer: Literal["adamw", "sgd"] = "adamw"
    dtype: torch.dtype = torch.float32
    options: Options = dataclasses.field(
        default_factory=lambda: Options(bucket_bytes=4096, clip_norm=0.5, allow_unused=True)
    )

    def parts(self, rank: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, LambdaLR]:
        """Return the model, equal on all ranks, its optimizer and a schedule; each rank has its own random states."""
        torch.manual_seed(7)
        model = Network().to(self.dtype)
        if self.optimizer == "adamw":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                model.parameters(), lr=0.01, weight_decay=0.1
            )
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, dampening=0.5)
        torch.manual_seed(100 + rank)
        return model, optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + 0.3 * step))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, bool]) -> Tensor:
        """Return the loss of a micro-batch."""
        outputs: Tensor = model(batch[0], batch[2])
        return (outputs - batch[1]).float().square().mean()


class Batches:
    """A rank's micro-batches, by a position that can be saved; only the first update uses the branch."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self.position = job, rank, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, bool]]:
        while self.position < self.job.micro_batches * self.job.updates:
            generator = torch.Generator().manual_seed(10_000 * self.rank + self.position)
            inputs, targets = (torch.randn(4, 7, generator=generator).to(self.job.dtype) for _ in range(2))
            self.position += 1
            yield inputs, targets, self.position <= self.job.micro_batches

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


State = dict[str, Tensor]


@dataclasses.dataclass(slots=True)
class Course:
    """One rank's record of a job."""

    shown: list[State] = dataclasses.field(default_factory=list)
    """States after every micro-batch, then the committed states at every update before `finish`."""
    committed: list[State] = dataclasses.field(default_factory=list)
    returned: list[int] = dataclasses.field(default_factory=list)
    """After how many micro-batches each of these updates came, then the report of every update without times and bytes.
    """
    records: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    incidents: list[Incident] = dataclasses.field(default_factory=list)
    masters: list[Tensor] = dataclasses.field(default_factory=list)
    """This rank's masters before `finish`; a model in low precision shows only some of their bits."""
    final: State = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """The notes of the load: the parts that the checkpoint could not restore."""
    ended_by: str | None = None
    """The error that ended a damaged job early."""

    def note(self, update: Update) -> None:
        """Record an update's report."""
        record = update.as_json()
        for name in ("seconds", "lane_seconds", "exposed_seconds", "sent_bytes", "incidents"):
            record.pop(name, None)
        self.records.append(record)
        self.incidents += update.incidents

    def differs_from(self, expected: "Course", what: str, after: int = 0) -> list[str]:
        """Return the first places where this course differs from another after so many updates."""
        begin = expected.returned[after - 1] if after else 0
        pairs = {
            "state shown": (expected.shown[begin:], self.shown),
            "state committed": (expected.committed[after:], self.committed),
            "record": (expected.records[after:], self.records),
            "master": (expected.masters, self.masters),
            "state after finish": (expected.final, self.final),
            "note": (expected.notes, self.notes),
        }
        found = [differing(*pair, name) for name, pair in pairs.items()]
        return [f"{what}, {text}" for texts in found for text in texts[:3]]


def train(
    job: Job, rank: int, group: dist.ProcessGroup, *, saves: Path | None = None, source: Path | None = None
) -> Course:
    """Train on this rank, from the start or from a checkpoint, and optionally save after every update, each
    separately.
    """
    model, optimizer, scheduler = job.parts(rank)
    batches, course, loss = Batches(job, rank), Course(), functools.partial(job.loss, model)
    parallel = DataParallel(
        model, optimizer, job.strategy, micro_batches=job.micro_batches, group=group, guards=job.guards,
        options=job.options,
    )  # fmt: skip

    def save() -> None:
        if saves is not None:
            folder = saves / f"{parallel.steps}"
            checkpoint.save(parallel, folder, loader=batches, extra=scheduler.state_dict())

    try:
        with parallel:
            if source is not None:
                restored = checkpoint.load(parallel, source, loader=batches)
                scheduler.load_state_dict(restored.extra)
                course.notes = restored.notes
            save()
            for batch in batches:
                update = parallel.micro_batch(loss, batch, weight=1.0 + 0.25 * rank)
                course.shown.append(_state_of(model))
                if update is None:
                    continue
                course.note(update)
                course.returned.append(len(course.shown))
                scheduler.step()
                if job.looks:
                    with parallel.settled(), torch.no_grad():
                        course.committed.append(_state_of(model))
                        model.eval()(torch.ones(2, 7, dtype=job.dtype), True)
                        model.train()
                save()
                if job.damage is not None and update.step == job.damage.behind:
                    job.damage.strike(parallel)
            course.masters = [master.clone() for master in parallel.job.sharded.masters]
            for update in parallel.finish():
                course.note(update)
    except StrettoError as error:
        if job.damage is None:
            raise
        course.ended_by = f"{type(error).__name__}: {error}"
    course.final = _state_of(model)
    return course


def _state_of(model: nn.Module) -> State:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: value.detach().clone() for name, value in named}


def goes_on(
    job: Job, ranks: int, *, saved_at: Sequence[int] | None = None, run: RunRanks = on_virtual_ranks
) -> list[str]:
    """Return how a saved job, and jobs that resume from its states, differ from a job that never stopped.

    The job is saved at the start and after every update. Jobs resume from all of these states, or from those in
    `saved_at`.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = run(ranks, functools.partial(_goes_on, job, folder, saved_at))
    return [f"rank {rank} of {ranks}: {text}" for rank, texts in enumerate(found) for text in texts]


def _goes_on(job: Job, folder: str, saved_at: Sequence[int] | None, *seat: Any) -> list[str]:
    straight = train(job, *seat)
    found = train(job, *seat, saves=Path(folder)).differs_from(straight, "saved after every update")
    for step in range(len(straight.returned)) if saved_at is None else saved_at:
        resumed = train(job, *seat, source=Path(folder, f"{step}"))
        found += resumed.differs_from(straight, f"resumed after update {step}", after=step)
        if job.damage is None:
            found += [
                f"resumed after update {step}: expected no incident, found {one}" for one in resumed.incidents
            ]
    return found


def plain(job: Job) -> list[State]:
    """Return the states of a plain single-process PyTorch loop after every update; a synchronous strategy must equal
    them.
    """
    model, optimizer, scheduler = job.parts()
    states = []
    for index, batch in enumerate(Batches(job, 0), start=1):
        (job.loss(model, batch) / job.micro_batches).backward()
        if index % job.micro_batches == 0:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            states.append(_state_of(model))
    return states
