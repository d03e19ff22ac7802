"""A linear model that shows, in its parameters, which micro-batches they have been trained on.

Parameter i is touched by micro-batch i alone, whose gradient is one: with plain SGD at a rate of one,

    φ_i = −(times that micro-batch i was applied) / (weight of the update that it was applied in).

What a micro-batch was taken at is then written in the parameters of that moment, and what an update applied in the
parameters after it.
"""

import dataclasses
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch import distributed as dist

from stretto.engine import Options
from stretto.parallel import DataParallel
from stretto.records import Update
from stretto.strategies import Strategy


class Tracer(nn.Module):
    """One parameter per micro-batch of the job, all ranks together."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.applied = nn.Parameter(torch.zeros(numel))

    def forward(self, micro_batch: int) -> Tensor:
        return self.applied[micro_batch]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A traced job; equal on all ranks."""

    strategy: Strategy
    micro_batches: int
    """Per rank and update."""
    updates: int
    """For which there are micro-batches; the last of them may be committed by `finish`."""
    idle: bool = False
    """Give weight zero to the last rank in the second update, to all in the third, and to all in the first half of
    the fourth."""
    looks: bool = True
    """Whether to look at the committed parameters at every update, which costs traffic where an estimate is shown."""
    numel: int | None = None
    """Parameters; None for one per micro-batch."""

    @property
    def per_rank(self) -> int:
        """Micro-batches of a rank."""
        return self.micro_batches * self.updates

    def weight(self, rank: int, world_size: int, index: int) -> float:
        """Return the weight of a rank's micro-batch."""
        update, place = divmod(index, self.micro_batches)
        is_idle = (
            (update == 1 and rank == world_size - 1)
            or update == 2
            or (update == 3 and place < self.micro_batches // 2)
        )
        return 0.0 if self.idle and is_idle else 1.0

    def committing(self, world_size: int) -> int:
        """Return how many updates have any weight."""
        weights = [
            sum(self.weight(rank, world_size, index) for rank in range(world_size))
            for index in range(self.per_rank)
        ]
        return sum(
            any(weights[i : i + self.micro_batches]) for i in range(0, self.per_rank, self.micro_batches)
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """What one rank saw of a traced job."""

    shown: list[Tensor]
    """Parameters that each of this rank's micro-batches was taken at."""
    committed: list[Tensor]
    """Committed parameters at every update that was returned in time, the start first."""
    final: Tensor
    """Parameters after `finish`."""
    updates: list[Update]
    """All of them, those of `finish` included."""


def trace(plan: Plan, rank: int, group: dist.ProcessGroup) -> Trace:
    """Run the job on this rank."""
    world_size = group.size()
    model = Tracer(plan.per_rank * world_size if plan.numel is None else plan.numel)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = Options(allow_unused=True)
    shown, committed, updates = [], [model.applied.detach().clone()], []
    with DataParallel(
        model,
        optimizer,
        plan.strategy,
        micro_batches=plan.micro_batches,
        group=group,
        options=options,
    ) as parallel:
        for index in range(plan.per_rank):
            shown.append(model.applied.detach().clone())
            loss = model(index * world_size + rank)
            update = parallel.backward(loss, weight=plan.weight(rank, world_size, index), samples=1)
            if update is not None:
                updates.append(update)
                if not plan.looks:
                    continue
                with parallel.settled():
                    committed.append(model.applied.detach().clone())
        updates += parallel.finish()
    return Trace(shown=shown, committed=committed, final=model.applied.detach().clone(), updates=updates)


class Traced:
    """The traces of all ranks of a job, read together."""

    def __init__(self, plan: Plan, traces: Sequence[Trace]) -> None:
        self.plan = plan
        self.traces = traces
        self.world_size = len(traces)

    def times_applied(self) -> list[tuple[int, int, float, float]]:
        """Return rank, index, expected and found times of every micro-batch that was not applied as it should be.

        The records say how many micro-batches of each rank an update holds, which come in their order.
        """
        updates, final = self.traces[0].updates, self.traces[0].final
        wrong = []
        for rank in range(self.world_size):
            ends = list(accumulate(update.micro_batches[rank] for update in updates))
            counted = 0
            for index in range(self.plan.per_rank):
                expected = self.plan.weight(rank, self.world_size, index)
                value = float(final[index * self.world_size + rank])
                update = next((u for u, end in zip(updates, ends, strict=True) if counted < end), None)
                counted += expected > 0
                found = 0.0 - value * (1.0 if expected == 0 or update is None else update.weight)
                if abs(found - expected) > 2**-20:  # one division, one product: two roundings of 2^-24
                    wrong.append((rank, index, expected, found))
        return wrong

    def freshest(self) -> list[int]:
        """Return, for each update seen in time, how many updates its freshest gradients lag behind.

        A gradient is as old as the newest committed update that is whole in the parameters it was taken at; an
        estimate counts from the committed parameters behind it.
        """
        committed = self.traces[0].committed
        lags = []
        for step in range(1, len(committed)):
            arrived = ((committed[step] != 0) & (committed[step - 1] == 0)).nonzero().flatten().tolist()
            behind = [self._newest_whole(self._taken_at(position), step - 1) for position in arrived]
            lags.append(min((step - 1 - newest for newest in behind), default=0))
        return lags

    def _taken_at(self, position: int) -> Tensor:
        index, rank = divmod(position, self.world_size)
        return self.traces[rank].shown[index]

    def _newest_whole(self, shown: Tensor, limit: int) -> int:
        """Return the newest committed update, up to `limit`, all of whose micro-batches are in `shown`."""
        committed = self.traces[0].committed
        return max(step for step in range(limit + 1) if bool((shown[committed[step] != 0] != 0).all()))
