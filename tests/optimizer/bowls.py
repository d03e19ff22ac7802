"""A small job whose every gradient depends on the values, and the same as a plain loop."""

import copy
from typing import Any

import torch
from torch import Tensor, nn, optim

from stretto import DataParallel, Options, Strategy
from stretto_lab.virtual import VirtualCluster

UPDATES = 3
SMALL = Options(bucket_bytes=1024)


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


def trained(
    shapes: list[tuple[int, ...]],
    make: Any,
    strategy: Strategy,
    world_size: int,
    *,
    options: Options = SMALL,
    alike: bool = False,
    updates: int = UPDATES,
) -> list[Tensor]:
    """Train on the virtual cluster, two micro-batches per update, and return rank 0's parameters.

    Ranks have gradients of their own, or with `alike` those of rank 0.
    """

    def program(rank: int, group: Any) -> list[Tensor]:
        model = Bowls(shapes)
        with DataParallel(model, make(model), strategy, micro_batches=2, group=group, options=options) as job:
            while job.steps < updates:
                job.backward(model(0 if alike else rank))
            with job.settled():
                return [p.detach().clone() for p in model.values]

    return VirtualCluster(world_size).run(program).values[0]


class PlainLoop:
    """The same in one process: plain autograd and stock optimizers."""

    def __init__(self, shapes: list[tuple[int, ...]], make: Any, world_size: int) -> None:
        self.model = Bowls(shapes)
        self.values = list(self.model.values)
        made = make(self.model)
        self.optimizers: list[optim.Optimizer] = made if isinstance(made, list) else [made]
        self.ranks = range(world_size)
        self.committed = [p.detach().clone() for p in self.values]

    def show(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.values, values, strict=True):
            parameter.data.copy_(value)

    def gradient(self, at: list[Tensor], count: int) -> list[Tensor]:
        """Add `count` gradients on each rank, and then the ranks."""
        self.show(at)
        total = [torch.zeros_like(p) for p in at]
        for rank in self.ranks:
            own = [torch.zeros_like(p) for p in at]
            for _ in range(count):
                torch._foreach_add_(own, torch.autograd.grad(self.model(rank), self.values))
            torch._foreach_add_(total, own)
        return total

    def stepped(self, sums: list[Tensor], count: int) -> list[Tensor]:
        self.show(self.committed)
        for parameter, total in zip(self.values, sums, strict=True):
            parameter.grad = total / (count * len(self.ranks))
        for optimizer in self.optimizers:
            optimizer.step()
        return [p.detach().clone() for p in self.values]

    def looked_ahead(self, sums: list[Tensor], count: int) -> list[Tensor]:
        """Return what a step would give: the optimizers step and are put back."""
        states = copy.deepcopy([optimizer.state_dict() for optimizer in self.optimizers])
        values = self.stepped(sums, count)
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        return values

    def synchronous_update(self) -> None:
        self.committed = self.stepped(self.gradient(self.committed, 2), 2)

    def acco_update(self, estimate: list[Tensor]) -> list[Tensor]:
        """Commit an update, and return the next estimate."""
        first, second = self.gradient(estimate, 1), self.gradient(self.committed, 1)
        estimate = self.looked_ahead(first, 1)
        self.committed = self.stepped([a + b for a, b in zip(first, second, strict=True)], 2)
        return estimate

    def late_update(self, at: list[Tensor]) -> list[Tensor]:
        """Commit an update with gradients at other values, and return what the same gradients predict for the next."""
        gradient = self.gradient(at, 2)
        self.committed = self.stepped(gradient, 2)
        return self.looked_ahead(gradient, 2)


def plain(
    shapes: list[tuple[int, ...]], make: Any, strategy: Strategy, world_size: int, updates: int = UPDATES
) -> list[Tensor]:
    """Return what the strategy's equations give, ranks with gradients of their own."""
    loop = PlainLoop(shapes, make, world_size)
    before = shown = loop.committed
    for _ in range(updates):
        if strategy.name == "acco":
            shown = loop.acco_update(shown)
        elif strategy.name == "dpu":
            previous = loop.committed
            loop.late_update(before)
            before = previous
        elif strategy.name == "wp":
            before, shown = shown, loop.late_update(before)
        else:
            loop.synchronous_update()
    return loop.committed


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert [torch.equal(*pair) for pair in zip(found, expected, strict=True)] == [True] * len(expected)
