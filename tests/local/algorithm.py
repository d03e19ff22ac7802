"""Algorithm 2 written down a second time, naively: all ranks in one process, stock optimizers on ordinary tensors."""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from stretto.strategies.local import Pace
from tests.exactness.jobs import Case, State, build_model, build_optimizer, mean_loss, rate, same, stream

CLIP_EPSILON = 1e-6


@dataclasses.dataclass
class Seen:
    """What one rank must see."""

    shown: list[State]
    committed: list[State]
    gaps: list[int]
    final: State


class Rank:
    """One rank's replica."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case = case
        self.model = build_model(case)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(case, self.parameters)
        self.base_rates = [group["lr"] for group in self.optimizer.param_groups]
        self.batches = stream(case, rank)
        self.window = 0.0

    def step(self, updates: int) -> None:
        """Step alone with the next micro-batches, if there are any."""
        weight, sums = 0.0, [torch.zeros_like(p) for p in self.parameters]
        for batch in [self.batches.pop(0) for _ in range(min(4, len(self.batches)))]:
            loss = mean_loss(self.model, batch)
            gradients = torch.autograd.grad(loss if batch[2] == 1.0 else loss * batch[2], self.parameters)
            sums = [total + gradient for total, gradient in zip(sums, gradients, strict=True)]
            weight += batch[2]
        if not weight:
            return
        for group, base in zip(self.optimizer.param_groups, self.base_rates, strict=True):
            group["lr"] = base * rate(updates)
        for parameter, total in zip(self.parameters, sums, strict=True):
            parameter.grad = total / weight
        self.optimizer.step()
        self.window += weight

    def values(self) -> State:
        return [parameter.detach().clone() for parameter in self.parameters]

    def moments(self) -> list[dict[str, Tensor]]:
        """Return the element-wise state of every parameter."""
        states = [self.optimizer.state[parameter] for parameter in self.parameters]
        return [{k: v for k, v in s.items() if isinstance(v, Tensor) and v.dim()} for s in states]


def mean(ranks: list[Rank], states: list[State]) -> State:
    """Return the weighted mean over ranks, added in rank order."""
    shares = [rank.window / sum(r.window for r in ranks) for rank in ranks]
    total = [value * shares[0] for value in states[0]]
    for share, state in zip(shares[1:], states[1:], strict=True):
        total = [t + value * share for t, value in zip(total, state, strict=True)]
    return total


def average(ranks: list[Rank]) -> None:
    """Make all replicas their mean, and where the strategy says so all moments theirs."""
    if not any(rank.window for rank in ranks):
        return
    everything = [[[rank.values() for rank in ranks], [rank.parameters for rank in ranks]]]
    if ranks[0].case.strategy.state:
        for key in ranks[0].moments()[0]:
            moments = [[moment[key] for moment in rank.moments()] for rank in ranks]
            everything.append([[[m.clone() for m in own] for own in moments], moments])
    with torch.no_grad():
        for values, targets in everything:
            means = mean(ranks, values)
            for own in targets:
                torch._foreach_copy_(own, means)
    for rank in ranks:
        rank.window = 0.0


def algorithm_2(case: Case, world_size: int) -> list[Seen]:
    """Return what every rank must see; all have equally many micro-batches, four to an update but for the last."""
    strategy = case.strategy
    pace = Pace(strategy.rate, strategy.plan, strategy.seed)
    ranks = [Rank(case, rank) for rank in range(world_size)]
    seen = [Seen([rank.values()], [], [], []) for rank in ranks]
    for updates, heads in rounds(case, pace):
        for rank in ranks:
            rank.step(updates)
        if heads:
            average(ranks)
        drifted = any(rank.window for rank in ranks)
        consensus = mean(ranks, [rank.values() for rank in ranks]) if drifted else None
        for rank, view in zip(ranks, seen, strict=True):
            if not same(rank.values(), view.shown[-1]):
                view.shown.append(rank.values())
            view.committed.append(consensus or rank.values())
            view.gaps.append(0 if heads else 1 + (view.gaps[-1] if view.gaps else 0))
    average(ranks)
    for rank, view in zip(ranks, seen, strict=True):
        # The last round holds less than four, and lands after the loop: nobody sees what comes before the mean.
        view.shown[-1] = view.final = rank.values()
    return seen


def rounds(case: Case, pace: Pace) -> Iterator[tuple[int, bool]]:
    """Yield the index of each round that holds data, and how the coin falls."""
    gap = 0
    for index in range(-(-case.length(0) // 4)):
        gap += 1
        capped = case.strategy.max_gap is not None and gap >= case.strategy.max_gap
        heads = capped or pace.is_due(index)
        gap = 0 if heads else gap
        yield index, heads
