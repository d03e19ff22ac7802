"""Every strategy as ten naive lines: all ranks in one process, plain autograd, a stock optimizer.

What makes the library's bits equal to these: a gradient accumulates in micro-batch order on its rank, owners
add the ranks in rank order in float32, one division by the total weight follows, and element-wise optimizers
do not see how a tensor is cut.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from stretto.flat import plan_layout
from tests.exactness.jobs import Case, State, build_model, build_optimizer, mean_loss, rate, stream

Counts = Sequence[Sequence[int]]
"""Micro-batches of one update, by round and rank."""
CLIP_EPSILON = 1e-6


@dataclasses.dataclass
class Sum:
    """Σ w·g over micro-batches and ranks; None for a parameter that none of them used."""

    gradients: list[Tensor | None]
    weight: float

    def __add__(self, other: "Sum") -> "Sum":
        return Sum(list(map(plus, self.gradients, other.gradients)), self.weight + other.weight)


@dataclasses.dataclass
class Trace:
    """What a job must show."""

    shown: list[State]
    """As in `Observed`; the drain's states, which nobody sees, are at the end."""
    committed: list[State]


def ddp(reference: "Reference", updates: Sequence[Counts]) -> Iterator[tuple[list[State], State]]:
    """θ_{t+1} = Opt(θ_t, g(θ_t)); also ZeRO-1."""
    committed = reference.start
    for (counts,) in reference.turned(updates):
        committed = reference.step(reference.gradient(committed, counts))
        yield [committed], committed


def dpu(reference: "Reference", updates: Sequence[Counts]) -> Iterator[tuple[list[State], State]]:
    """θ_{t+1} = Opt(θ_t, g(θ_{t-1}))."""
    previous = committed = reference.start
    for (counts,) in reference.turned(updates):
        gradient = reference.gradient(previous, counts)
        previous, committed = committed, reference.step(gradient)
        yield [committed], committed


def wp(reference: "Reference", updates: Sequence[Counts]) -> Iterator[tuple[list[State], State]]:
    """θ_{t+1} = Opt(θ_t, g(x_t)), x_{t+2} = peek(θ_{t+1}, g(x_t)); x_0 = x_1 = θ_0."""
    prediction = following = reference.start
    for (counts,) in reference.turned(updates):
        gradient = reference.gradient(prediction, counts)
        committed = reference.step(gradient)
        prediction, following = following, reference.peek(gradient)
        yield [following], committed


def acco(reference: "Reference", updates: Sequence[Counts]) -> Iterator[tuple[list[State], State]]:
    """θ̃_{t+1} = peek(θ_t, g(θ̃_t; A)), θ_{t+1} = Opt(θ_t, g(θ̃_t; A) + g(θ_t; B)); θ̃_0 = θ_0."""
    estimate = committed = reference.start
    for first, second in reference.turned(updates):
        at_estimate = reference.gradient(estimate, first)
        at_committed = reference.gradient(committed, second)
        estimate = reference.peek(at_estimate)
        committed = reference.step(at_estimate + at_committed)
        yield [estimate, committed], committed


Equations = Callable[["Reference", Sequence[Counts]], Iterator[tuple[list[State], State]]]
"""Yields, for every update, the states that are shown and the one that is committed."""
EQUATIONS: dict[str, Equations] = {
    "ddp": ddp, "zero1": ddp, "dpu": dpu, "wp": wp, "acco": acco,
}  # fmt: skip


def trace(
    case: Case, world_size: int, updates: Sequence[Counts], equations: Equations | None = None
) -> Trace:
    """Return what the case must show when its updates use these micro-batches."""
    reference = Reference(case, world_size)
    result = Trace([reference.start], [])
    for shown, committed in (equations or EQUATIONS[case.strategy.name])(reference, updates):
        result.shown.extend(shown)
        result.committed.append(committed)
    return result


def fixed_counts(length: int, quotas: Sequence[int], world_size: int) -> list[Counts]:
    """Cut `length` micro-batches per rank into updates of `quotas`; the last may be a part of one."""
    updates = []
    while length > 0:
        counts = [min(quota, max(0, length - sum(quotas[:i]))) for i, quota in enumerate(quotas)]
        updates.append([[count] * world_size for count in counts])
        length -= sum(counts)
    return updates


class Reference:
    """One model for the gradients, float32 masters, and a stock optimizer over them."""

    def __init__(self, case: Case, world_size: int) -> None:
        self.case = case
        self.model = build_model(case)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.start = [p.detach().clone() for p in self.parameters]
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.parameters]
        self.optimizer = build_optimizer(case, self.masters)
        self.base_rates = [group["lr"] for group in self.optimizer.param_groups]
        self.steps = 0
        self.ranks = range(world_size)
        self.streams = [iter(stream(case, rank)) for rank in self.ranks]
        self.replicated = case.strategy.name == "ddp"
        self.wire = {"fp32": torch.float32, "bf16": torch.bfloat16}[case.options.wire]
        self.accumulation = torch.float32 if case.options.accumulate == "fp32" else case.dtype
        plan = build_optimizer(case, self.parameters)
        self.layout, in_flat_order = plan_layout(
            self.model,
            plan,
            world_size=world_size,
            bucket_bytes=case.options.bucket_bytes,
            widen=case.options.accumulate == "fp32",
        )
        self.flat_order = [next(i for i, p in enumerate(self.parameters) if p is q) for q in in_flat_order]

    def turned(self, updates: Sequence[Counts]) -> Iterator[Counts]:
        """Yield the updates, the learning rate turned before each as often as was committed."""
        for update in updates:
            for group, base in zip(self.optimizer.param_groups, self.base_rates, strict=True):
                group["lr"] = base * (rate(self.steps) if self.case.scheduled else 1.0)
            yield update

    def gradient(self, shown: State, counts: Sequence[int]) -> Sum:
        """Take the next `counts[r]` micro-batches of every rank r at the parameters `shown`."""
        with torch.no_grad():
            for parameter, value in zip(self.parameters, shown, strict=True):
                parameter.copy_(value)
        total = Sum([None] * len(self.parameters), 0.0)
        for rank in self.ranks:
            own = self.gradient_of_rank(rank, counts[rank])
            total = total + Sum([self.sent(g) for g in own.gradients], own.weight)
        if any(g is not None and not g.isfinite().all() for g in total.gradients):
            return Sum([None] * len(self.parameters), 0.0)
        if self.replicated:
            total.gradients = [self.sent(g) for g in total.gradients]
        return total

    def gradient_of_rank(self, rank: int, count: int) -> Sum:
        """Add up micro-batches in their order, in the dtype of accumulation."""
        own = Sum([None] * len(self.parameters), 0.0)
        for _ in range(count):
            batch = next(self.streams[rank])
            weight = batch[2]
            loss = mean_loss(self.model, batch)
            # A 16-bit model would round the weight on its way through the backward pass: gradients take it then.
            before, behind = (weight, 1.0) if self.case.dtype.itemsize >= 4 else (1.0, weight)
            gradients = torch.autograd.grad(
                loss if before == 1.0 else loss * before, self.parameters, allow_unused=True
            )
            arrived = [None if g is None else g.to(self.accumulation) * behind for g in gradients]
            own = own + Sum(arrived, weight)
        return own

    def step(self, total: Sum) -> State:
        """Commit; return what the ranks then show."""
        self.steps += total.weight > 0
        return self.apply(total, self.optimizer, self.masters)

    def peek(self, total: Sum) -> State:
        """Return what `step` would show, by stepping copies of everything."""
        return self.apply(total, *copy.deepcopy((self.optimizer, self.masters)))

    def apply(self, total: Sum, optimizer: torch.optim.Optimizer, masters: list[Tensor]) -> State:
        """Step with the clipped mean; nothing happens where nobody contributed."""
        if total.weight > 0:
            clip = self.clip(total)
            for master, gradient in zip(masters, total.gradients, strict=True):
                master.grad = None if gradient is None else gradient.div(total.weight).mul(clip)
            optimizer.step()
        values = [master.detach().clone() for master in masters]
        if not self.replicated:
            values = [value.to(self.narrower(self.case.dtype)) for value in values]
        return [value.to(self.case.dtype) for value in values]

    def clip(self, total: Sum) -> float:
        """Return the factor for the global norm, added up as the owners measure it: slice by slice."""
        if self.case.options.clip_norm is None:
            return 1.0
        flat = torch.zeros(self.layout.numel)
        for slot, index in zip(self.layout.slots, self.flat_order, strict=True):
            gradient = total.gradients[index]
            if gradient is not None:
                flat[slot.start : slot.stop] = gradient.flatten()
        owners = [0] if self.replicated else self.ranks
        squared = 0.0
        for owner in owners:
            slices = [bucket.owned_range(owner, len(owners)) for bucket in self.layout.buckets]
            squared += sum(float(flat[low:high].double().norm()) ** 2 for low, high in slices)
        norm = math.sqrt(squared) / total.weight
        return min(1.0, self.case.options.clip_norm / (norm + CLIP_EPSILON))

    def sent(self, gradient: Tensor | None) -> Tensor | None:
        """Round a gradient to the wire."""
        return None if gradient is None else gradient.to(self.narrower(self.accumulation)).float()

    def narrower(self, storage: torch.dtype) -> torch.dtype:
        """Values travel in the wire's dtype or in their own, whichever is smaller."""
        return min(self.wire, storage, key=lambda dtype: dtype.itemsize)


def plus(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """Add, where None is nothing."""
    if left is None or right is None:
        return right if left is None else left
    return left + right
