"""What is accepted trains as a plain loop does, to the bit, on any number of ranks."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from stretto import ACCO, DDP, DataParallel, Options, Strategy, ZeRO1
from stretto.errors import UnsupportedOptimizer
from stretto.optimizer import check_shardable
from stretto.virtual import VirtualCluster
from tests.optimizer.written import ELEMENT_WISE, ClipsByNorm, CountsInGroup, Lamb, Lion, Lookahead

UPDATES = 3
SMALL = Options(bucket_bytes=1024)
STRATEGIES = {"zero1": ZeRO1, "ddp": DDP, "acco": ACCO}


class Bowls(nn.Module):
    """A square loss per parameter and rank, so that every gradient depends on the values."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.values = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self, rank: int) -> Tensor:
        return sum(((rank + 1) * (p - 0.25 * rank) ** 2).sum() for p in self.values)


def groups_of(model: Bowls, num_groups: int = 2, settings: Any = None) -> list[dict[str, Any]]:
    """Deal the parameters to groups in turn."""
    values = list(model.values)
    given = settings or [{} for _ in range(num_groups)]
    return [{"params": values[index::num_groups], **given[index]} for index in range(num_groups)]


def trained(shapes: list[tuple[int, ...]], make: Any, strategy: Strategy, world_size: int) -> list[Tensor]:
    """Train on the virtual cluster, two micro-batches per update, and return rank 0's parameters."""

    def program(rank: int, group: Any) -> list[Tensor]:
        model = Bowls(shapes)
        with DataParallel(model, make(model), strategy, micro_batches=2, group=group, options=SMALL) as job:
            while job.steps < UPDATES:
                job.backward(model(rank))
            with job.settled():
                return [p.detach().clone() for p in model.values]

    return VirtualCluster(world_size).run(program).values[0]


class PlainLoop:
    """The same in one process: plain autograd and a stock optimizer."""

    def __init__(self, shapes: list[tuple[int, ...]], make: Any, world_size: int) -> None:
        self.model = Bowls(shapes)
        self.values = list(self.model.values)
        self.optimizer = make(self.model)
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
        self.optimizer.step()
        return [p.detach().clone() for p in self.values]

    def synchronous_update(self) -> None:
        self.committed = self.stepped(self.gradient(self.committed, 2), 2)

    def acco_update(self, estimate: list[Tensor]) -> list[Tensor]:
        """Commit an update, and return the next estimate, for which the optimizer steps and is put back."""
        first, second = self.gradient(estimate, 1), self.gradient(self.committed, 1)
        state = copy.deepcopy(self.optimizer.state_dict())
        estimate = self.stepped(first, 1)
        self.optimizer.load_state_dict(state)
        self.committed = self.stepped([a + b for a, b in zip(first, second, strict=True)], 2)
        return estimate


def plain(shapes: list[tuple[int, ...]], make: Any, strategy: Strategy, world_size: int) -> list[Tensor]:
    loop = PlainLoop(shapes, make, world_size)
    estimate = loop.committed
    for _ in range(UPDATES):
        if strategy.name == "acco":
            estimate = loop.acco_update(estimate)
        else:
            loop.synchronous_update()
    return loop.committed


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert [torch.equal(*pair) for pair in zip(found, expected, strict=True)] == [True] * len(expected)


@pytest.mark.parametrize(("strategy", "world_size"), [("zero1", 3), ("ddp", 2), ("acco", 1)])
@pytest.mark.parametrize("name", ELEMENT_WISE)
def test_accepted_optimizer_equals_a_plain_loop(name: str, strategy: str, world_size: int) -> None:
    case = (
        [(9, 31), (31,), (70, 3)],
        lambda model: ELEMENT_WISE[name](groups_of(model, 2, [{}, {"lr": 0.003}])),
    )
    found = trained(*case, STRATEGIES[strategy](), world_size)
    assert_equal(found, plain(*case, STRATEGIES[strategy](), world_size))


def random_settings(draw: random.Random, kind: type[optim.Optimizer]) -> dict[str, Any]:
    """Draw the settings of one group."""
    settings = {
        optim.SGD: {"momentum": draw.choice([0.0, 0.9]), "weight_decay": draw.choice([0.0, 0.1])},
        optim.AdamW: {"betas": (draw.random(), 0.9), "amsgrad": draw.random() < 0.5},
        optim.RMSprop: {"momentum": draw.choice([0.0, 0.5]), "centered": draw.random() < 0.5},
        Lion: {"weight_decay": draw.random()},
        Lookahead: {"period": draw.randint(1, 3)},
        Lamb: {"weight_decay": draw.choice([0.0, 0.0, 0.1])},
        ClipsByNorm: {"bound": 10.0 ** draw.randint(-2, 2)},
        CountsInGroup: {},
    }
    return {**settings[kind], "lr": draw.uniform(0.001, 0.1)}


KINDS = [optim.SGD, optim.AdamW, optim.RMSprop, Lion, Lookahead, Lamb, ClipsByNorm, CountsInGroup]


@pytest.mark.parametrize("part", range(4))
def test_random_optimizers_are_right_or_refused(part: int) -> None:
    accepted = 0
    for seed in range(part, 200, 4):
        draw = random.Random(seed)
        kind = draw.choice(KINDS)
        settings = [random_settings(draw, kind) for _ in range(draw.randint(1, 3))]
        shapes = [
            tuple(draw.randint(1, 12) for _ in range(draw.randint(0, 3)))
            for _ in range(draw.randint(len(settings), 5))
        ]
        couples = kind is ClipsByNorm or (kind is Lamb and any(one["weight_decay"] for one in settings))

        def make(model: Bowls, kind: Any = kind, settings: Any = settings) -> optim.Optimizer:
            return kind(groups_of(model, len(settings), settings))

        if couples or kind is CountsInGroup:
            with pytest.raises(UnsupportedOptimizer):
                check_shardable(make(Bowls(shapes)))
            continue
        accepted += 1
        strategy, world_size = STRATEGIES[draw.choice(list(STRATEGIES))](), draw.randint(1, 3)
        found = trained(shapes, make, strategy, world_size)
        assert_equal(found, plain(shapes, make, strategy, world_size))
    assert accepted > 25
