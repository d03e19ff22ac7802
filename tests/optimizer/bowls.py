"""A small job whose every gradient depends on the values, and the same as a plain loop."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stretto import DataParallel, Options, Strategy, Update, ZeRO1
from stretto.optimizer.several import Several
from stretto_lab.virtual import VirtualCluster
from tests.exactness.jobs import Case, State
from tests.exactness.reference import EQUATIONS, Counts, Reference, Sum

UPDATES = 3
SMALL = Options(bucket_bytes=1024)
ZERO1 = ZeRO1()


class Bowls(nn.Module):
    """A square loss per parameter and rank, so that every gradient depends on the values."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.values = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self, rank: int, unused: int | None = None) -> Tensor:
        used = [p for index, p in enumerate(self.values) if index != unused]
        return sum(((rank + 1) * (p - 0.25 * rank) ** 2).sum() for p in used)


def groups_of(model: Bowls, num_groups: int = 2, settings: Any = None) -> list[dict[str, Any]]:
    """Deal the parameters to groups in turn."""
    values = list(model.values)
    given = settings or [{} for _ in range(num_groups)]
    return [{"params": values[index::num_groups], **given[index]} for index in range(num_groups)]


Train = Callable[[DataParallel, nn.Module, int], Update | None]
"""Trains on a micro-batch, given the job, its model and the rank."""


def on_own(job: DataParallel, model: nn.Module, rank: int) -> Update | None:
    return job.backward(model(rank))


def on_ranks(
    world_size: int,
    model_of: Callable[[], nn.Module],
    optimizer: Any,
    train: Train = on_own,
    *,
    strategy: Strategy = ZERO1,
    updates: int = UPDATES,
    **settings: Any,
) -> list[tuple[list[Tensor], DataParallel, list[Update]]]:
    """Train on the virtual cluster; return every rank's parameters, its job and the updates it was told of."""

    def program(rank: int, group: Any) -> tuple[list[Tensor], DataParallel, list[Update]]:
        model, told = model_of(), []
        given = {"options": SMALL, **settings}
        with DataParallel(model, optimizer(model), strategy, group=group, **given) as job:
            while job.steps < updates:
                told.append(train(job, model, rank))
            with job.settled():
                values = [p.detach().clone() for p in model.values]
        return values, job, [update for update in told if update]

    return list(VirtualCluster(world_size).run(program).values)


def trained(
    shapes: list[tuple[int, ...]],
    make: Any,
    strategy: Strategy,
    world_size: int,
    *,
    alike: bool = False,
    **settings: Any,
) -> list[Tensor]:
    """Train with two micro-batches per update, ranks on their own or `alike`; return rank 0's parameters."""
    train = (lambda job, model, rank: job.backward(model(0))) if alike else on_own
    settings = {"strategy": strategy, "micro_batches": 2, **settings}
    return on_ranks(world_size, lambda: Bowls(shapes), make, train, **settings)[0][0]


class PlainLoop(Reference):
    """The same in one process: the equations of a strategy, plain autograd and stock optimizers."""

    def __init__(self, shapes: list[tuple[int, ...]], make: Any, strategy: Strategy, world_size: int) -> None:
        self.case = Case(strategy=strategy, options=SMALL)
        self.model, held = Bowls(shapes), Bowls(shapes)
        self.parameters, self.masters = list(self.model.values), list(held.values)
        self.start = [p.detach().clone() for p in self.parameters]
        made = make(held)
        self.optimizer = Several(made) if isinstance(made, list) else made
        self.steps, self.ranks, self.replicated = 0, range(world_size), False
        self.wire = self.accumulation = torch.float32

    def turned(self, updates: Sequence[Counts]) -> Iterator[Counts]:
        """Yield the updates: nobody turns the rates."""
        yield from updates

    def gradient_of_rank(self, rank: int, count: int) -> Sum:
        own = Sum([None] * len(self.parameters), 0.0)
        for _ in range(count):
            own = own + Sum(list(torch.autograd.grad(self.model(rank), self.parameters)), 1.0)
        return own

    def peek(self, total: Sum) -> State:
        """Return what a step would show, and undo it: a copy of an optimizer has not what its class puts on it."""
        masters, state = copy.deepcopy((self.masters, self.optimizer.state_dict()))
        shown = self.apply(total, self.optimizer, self.masters)
        self.optimizer.load_state_dict(state)
        for master, value in zip(self.masters, masters, strict=True):
            master.data.copy_(value)
        return shown


def plain(
    shapes: list[tuple[int, ...]], make: Any, strategy: Strategy, world_size: int, updates: int = UPDATES
) -> list[Tensor]:
    """Return what the strategy's equations give, ranks with gradients of their own."""
    rounds = [1, 1] if strategy.name == "acco" else [2]
    counts = [[[count] * world_size for count in rounds]] * updates
    equations = EQUATIONS.get(strategy.name, EQUATIONS["ddp"])
    *_, (_, committed) = equations(PlainLoop(shapes, make, strategy, world_size), counts)
    return committed


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert [torch.equal(*pair) for pair in zip(found, expected, strict=True)] == [True] * len(expected)
