"""Guards that a test can see at work, and a job to give them to."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

import stretto as st
from stretto.errors import CorruptionError, PeerFailed
from stretto.guards.contract import Fingerprint, GuardScript, Report, Share
from stretto.records import Incident, Update
from stretto_lab.faults import Fault, FaultPlan, FaultyGroup, Injector, strike_memory
from stretto_lab.testing import differing
from stretto_lab.virtual import VirtualCluster, VirtualGroup

STRATEGIES: dict[str, st.Strategy] = {
    "ddp": st.DDP(),
    "zero1": st.ZeRO1(),
    "dpu": st.DPU(),
    "wp": st.WeightPrediction(),
    "acco": st.ACCO(),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Telltale(st.Guard):
    """Reports what it was answered, at every moment it is asked."""

    name = "telltale"
    overlaps = False
    needs_replicas = False

    threshold: int = 0
    """Means nothing; ranks can differ in it."""

    def after_update(self) -> GuardScript:
        digests = yield Fingerprint()
        records = yield Share(len(digests).to_bytes(2))
        yield Report(guard=self.name, site="after", part=str(len(records)), ranks=(0,), action="none")

    def before_step(self) -> GuardScript:
        yield Report(guard=self.name, site="before", part="", ranks=(), action="none")


class Network(nn.Module):
    """Two layers, a frozen parameter, and a buffer that nobody writes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(6, width)
        self.leave = nn.Linear(width, 3)
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("shift", torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.enter(x))) * self.scale + self.get_buffer("shift")


class Job:
    """A small job on this rank, with micro-batches of its own."""

    def __init__(
        self,
        strategy: st.Strategy,
        rank: int,
        *,
        width: int = 19,
        replayable: bool = True,
        frozen: Collection[str] = (),
        **choices: Any,
    ) -> None:
        torch.manual_seed(3)
        self.model = Network(width)
        for name in frozen:
            self.model.get_parameter(name).requires_grad_(False)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        choices.setdefault("options", st.Options(bucket_bytes=1024))
        self.parallel = st.DataParallel(self.model, optimizer, strategy, micro_batches=2, **choices)
        self.replayable = replayable
        """Whether micro-batches are handed over before their forward pass."""
        self._generator = torch.Generator().manual_seed(100 + rank)

    def micro_batch(self) -> Update | None:
        """Train on one micro-batch."""
        x = torch.randn(4, 6, generator=self._generator)
        if self.replayable:
            return self.parallel.micro_batch(self._loss, x)
        return self.parallel.backward(self._loss(x))

    def run(self, micro_batches: int = 8) -> list[Update]:
        """Train and finish."""
        updates = [update for _ in range(micro_batches) if (update := self.micro_batch())]
        return updates + self.parallel.finish()

    def _loss(self, x: Tensor) -> Tensor:
        output: Tensor = self.model(x)
        return output.square().mean()

    def final(self) -> list[Tensor]:
        """Copies of the parameters."""
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """What became of one rank."""

    final: list[Tensor]
    """Parameters and buffers."""
    incidents: list[Incident]
    losses: list[float]
    draw: float
    """The next number that the rank would have drawn."""
    error: Exception | None = None
    changed: list[bool] = dataclasses.field(default_factory=list)
    """Whether each fault that struck changed something."""


def seen_of(model: nn.Module, updates: Sequence[Update], **others: Any) -> Seen:
    return Seen(
        final=[value.detach().clone() for value in (*model.parameters(), *model.buffers())],
        incidents=[incident for update in updates for incident in update.incidents],
        losses=[update.loss for update in updates],
        draw=float(torch.rand(())),
        **others,
    )


def struck(
    strategy: st.Strategy,
    *faults: Fault,
    ranks: int = 3,
    damage: Callable[[st.DataParallel], None] | None = None,
    damaged_rank: int = 1,
    length: int = 8,
    **choices: Any,
) -> tuple[Seen, ...]:
    """Train small jobs on virtual ranks, struck on their links and in memory; errors of corruption are noted.

    Each has `length` micro-batches. `damage` is called on one rank after its third micro-batch.
    """

    def program(rank: int, group: VirtualGroup) -> Seen:
        injector = Injector(FaultPlan(faults), rank)
        job = Job(strategy, rank, group=FaultyGroup(group, injector), **choices)
        strike_memory(job.parallel, injector)
        error, updates = None, []
        try:
            for index in range(length):
                update = job.micro_batch()
                updates += [update] if update else []
                if index == 2 and rank == damaged_rank and damage is not None:
                    damage(job.parallel)
            updates += job.parallel.finish()
        except (CorruptionError, PeerFailed) as raised:
            error = raised
        found = seen_of(
            job.model, updates, error=error, changed=[one.changed for one in injector.applications]
        )
        late = [] if error else job.parallel.late_incidents
        return dataclasses.replace(found, incidents=[*found.incidents, *late])

    return VirtualCluster(ranks).run(program).values


class Trainer:
    """Trains a model that drops out, counts batches and keeps running statistics, on batches that weigh by their
    length."""

    def __init__(
        self, rank: int, group: dist.ProcessGroup | None, strategy: st.Strategy, **choices: Any
    ) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(
            nn.Linear(5, 19), nn.BatchNorm1d(19), nn.Tanh(), nn.Dropout(0.2), nn.Linear(19, 3)
        )
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        settings = {"micro_batches": 2, "options": st.Options(bucket_bytes=512), **choices}
        self.parallel = st.DataParallel(self.model, optimizer, strategy, group=group, **settings)
        torch.manual_seed(100 + rank)
        self._data = torch.Generator().manual_seed(rank)
        self.updates: list[Update] = []
        self.index = 0
        """Of the micro-batch under way."""

    def loss(self, batch: Tensor) -> tuple[Tensor, float, int]:
        return self.model(batch).square().mean(), float(len(batch)), len(batch)

    def micro_batch(self, index: int, *, replayable: bool = True, weight: float | None = None) -> None:
        """Train on a batch of its own length, which it weighs by unless it is told otherwise."""
        self.index = index
        batch = torch.randn(3 + index % 3, 5, generator=self._data)
        if weight is not None:
            update = self.parallel.micro_batch(lambda batch: self.loss(batch)[0], batch, weight)
        elif replayable:
            update = self.parallel.micro_batch(self.loss, batch)
        else:
            update = self.parallel.backward(*self.loss(batch))
        self.updates += [update] if update else []

    def run(self, length: int = 8) -> Seen:
        """Train so many micro-batches, and finish."""
        with self.parallel:
            for index in range(length):
                self.micro_batch(index)
            return self.end()

    def end(self) -> Seen:
        self.updates += self.parallel.finish()
        return seen_of(self.model, self.updates)


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    """Whether two sets of tensors are equal to the bit."""
    return differing(left, right) == []


def apart(found: Sequence[Seen], expected: Sequence[Seen]) -> list[str]:
    """What differs of parameters, buffers, losses and random draws."""

    def told(one: Seen) -> tuple[list[Tensor], Tensor]:
        return one.final, torch.tensor(
            [*one.losses, one.draw], dtype=torch.float64
        )  # where NaN equals itself

    return differing([told(one) for one in expected], [told(one) for one in found], "rank")
