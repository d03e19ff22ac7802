"""A small job of one matrix on virtual ranks, and the same written down a second time, naively."""

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

import stretto as st
from stretto.groups import Link
from stretto_lab.virtual import Compute, Network, VirtualCluster

WIDTH, HEIGHT, RATE = 64, 12, 0.05
RANKS, UPDATES = 2, 11
BUCKET = 128
"""Elements; the least that two ranks can share. The matrix has six buckets."""


@dataclasses.dataclass
class Course:
    """What one rank saw."""

    shown: list[Tensor]
    """The matrix after every update, and after `finish`."""
    updates: list[st.Update]
    times: list[int]
    """Virtual nanoseconds at every update."""
    sent_bytes: int
    """From the first update to the end."""
    parallel: st.DataParallel


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def weight(rank: int, step: int) -> float:
    """A power of two, by which gradients can be multiplied and divided without rounding."""
    return float(2 ** (rank * step % 3))


def matrix() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(WIDTH, HEIGHT, bias=False)


def loss(model: nn.Module, rank: int, step: int) -> Tensor:
    output: Tensor = model(batch(rank, step))
    return (output - 1).square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def start(
    rank: int, group: dist.ProcessGroup | None, strategy: st.Strategy, **others: Any
) -> st.DataParallel:
    model = matrix()
    optimizer = others.pop("optimizer", sgd)(model.parameters())
    options = st.Options(bucket_bytes=4 * BUCKET, **others.pop("options", {}))
    return st.DataParallel(
        model, optimizer, strategy, micro_batches=1, group=group, options=options, **others
    )


def go_on(parallel: st.DataParallel, steps: range, course: Course) -> None:
    for step in steps:
        update = parallel.backward(
            loss(parallel.model, parallel.rank, step), weight=weight(parallel.rank, step)
        )
        assert update is not None
        course.updates.append(update)
        course.shown.append(parallel.model.weight.detach().clone())
        course.times.append(getattr(parallel.job.exchange.group, "now_ns", 0))


def train(
    rank: int,
    group: dist.ProcessGroup | None,
    strategy: st.Strategy,
    updates: int = UPDATES,
    **others: Any,
) -> Course:
    parallel = start(rank, group, strategy, **others)
    course, before = Course([], [], [], 0, parallel), parallel.sent_bytes
    go_on(parallel, range(updates), course)
    course.sent_bytes = parallel.sent_bytes - before
    course.updates += parallel.finish()
    course.shown.append(parallel.model.weight.detach().clone())
    return course


def on_cluster(strategy: st.Strategy, ranks: int = RANKS, link: str = "", **others: Any) -> list[Course]:
    network = Network(link=Link(bits_per_second=1e7, latency_seconds=1e-4)) if link else Network()
    cluster = VirtualCluster(ranks, network=network, compute=Compute(micro_batch_ns=1_000_000))
    return list(cluster.run(lambda rank, group: train(rank, group, strategy, **others)).values)


def drawn(seed: int, longest: int = 6) -> st.DiLoCo:
    """Any options, often such that a fragment is under way, or lands mixed, when somebody looks."""
    draw = random.Random(seed)
    fragments = draw.choice((1, 2, 3))
    interval = draw.randint(fragments, longest)
    delay = draw.randrange(interval // fragments)
    return st.DiLoCo(
        interval,
        fragments,
        draw.choice((1.0, 0.5, 1.3)),
        draw.choice((0.0, 0.6, 0.9)),
        nesterov=draw.random() < 0.7,
        delay=delay,
        mix=draw.choice((0.0, 0.25, 0.5)),
        keep_progress=bool(delay) and draw.random() < 0.5,
    )


class Naive:
    """DiLoCo of all ranks in one place, element by element; or, where `averages` says when, Algorithm 2 of `local`.

    Averages of `state` are those of the optimizers' states too.
    """

    def __init__(
        self,
        strategy: st.DiLoCo,
        ranks: int = RANKS,
        optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
        averages: Callable[[int], bool] | None = None,
        *,
        state: bool = False,
    ) -> None:
        self.strategy, self.ranks, self.averages, self.state = strategy, ranks, averages, state
        self.models = [matrix() for _ in range(ranks)]
        self.optimizers = [optimizer(model.parameters()) for model in self.models]
        self.anchor = self.values()[0].clone()
        self.velocity = torch.zeros_like(self.anchor)
        self.since = torch.zeros(self.strategy.fragments, ranks, dtype=torch.float64)
        self.left_with = self.since.clone()
        bucket = max(BUCKET, BUCKET // 2 * ranks)  # the least that they can share
        numbers = torch.arange(self.anchor.numel()) // bucket % self.strategy.fragments
        self.fragment_of = numbers.view_as(self.anchor)
        self.left: dict[int, list[Tensor]] = {}
        """What every rank held then, where its progress since is kept."""
        self.departed: dict[int, int] = {}
        """The fragment that left after an update and has not landed, by the number of the update."""

    def values(self) -> list[Tensor]:
        return [model.weight.detach() for model in self.models]

    def run(self) -> list[list[Tensor]]:
        """What every rank shows after each update and at the end."""
        seen = []
        for step in range(UPDATES):
            self.step_alone(step)
            self.land(step - self.strategy.delay)
            self.leave(step)
            if not self.strategy.delay:
                self.land(step)
            seen.append([value.clone() for value in self.values()])
        for step in list(self.departed):
            self.land(step)
        self.unite()
        return [*seen, [value.clone() for value in self.values()]]

    def step_alone(self, step: int) -> None:
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
            self.since[:, rank] += weight(rank, step)

    def is_due(self, fragment: int, step: int) -> bool:
        interval, count = self.strategy.interval, self.strategy.fragments
        if self.averages is not None:
            return self.averages(step)
        return (step + 1) % interval == (fragment + 1) * interval // count % interval

    def leave(self, step: int) -> None:
        for fragment in range(self.strategy.fragments):
            if self.is_due(fragment, step):
                self.departed[step] = fragment
                self.left[step] = [value.clone() for value in self.values()]
                here = self.fragment_of == fragment
                mean = self.mean(fragment)
                changed = mean - self.anchor
                velocity = self.strategy.outer_momentum * self.velocity + changed
                ahead = velocity * self.strategy.outer_momentum + changed
                moved = self.strategy.outer_lr * (ahead if self.strategy.nesterov else velocity)
                self.velocity = torch.where(here, velocity, self.velocity)
                self.anchor = torch.where(here, (moved - changed) + mean, self.anchor)
                if self.state:
                    self.average_states()
                self.left_with[fragment] = self.since[fragment]
                self.since[fragment] = 0

    def land(self, step: int) -> None:
        if step in self.departed:
            here, mix = self.fragment_of == self.departed.pop(step), self.strategy.mix
            for value, left in zip(self.values(), self.left[step], strict=True):
                target = self.anchor + (value - left) if self.strategy.keep_progress else self.anchor
                mixed = (value * mix).add(target, alpha=1 - mix) if mix else target
                value.copy_(torch.where(here, mixed, value))

    def mean(self, fragment: int) -> Tensor:
        return self.weighted(self.values(), fragment)

    def weighted(self, values: list[Tensor], fragment: int) -> Tensor:
        """The mean by what each rank has contributed, added up in rank order."""
        # What lands mixed may differ though nothing has come since: ranks count as when it left.
        since = self.since[fragment] if self.since[fragment].any() else self.left_with[fragment]
        parts = [value * share for value, share in zip(values, (since / since.sum()).tolist(), strict=True)]
        return functools.reduce(torch.add, parts)

    def average_states(self) -> None:
        states = [next(iter(optimizer.state.values())) for optimizer in self.optimizers]
        for name in [name for name, value in states[0].items() if value.dim()]:
            mean = self.weighted([state[name] for state in states], 0)
            for state in states:
                state[name].copy_(mean)

    def unite(self) -> None:
        keeps_own = bool(self.strategy.mix) or self.strategy.keep_progress
        for fragment in range(self.strategy.fragments):
            if self.since[fragment].any() or keeps_own:
                mean = self.mean(fragment)
                for value in self.values():
                    value.copy_(torch.where(self.fragment_of == fragment, mean, value))
