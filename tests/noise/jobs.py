"""A job whose gradients do not depend on its parameters, so that what noise adds to every step can be read off."""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

import stretto as st
from stretto_lab.virtual import VirtualCluster

SHAPES = ((93, 81), (81,), (5, 101), (3,), (64, 61))
"""Odd ones, so that padding lies between parameters; two are smaller than what a rank owns at least."""
NUMEL = 7_533 + 81 + 505 + 3 + 3_904
UPDATES = 5
NEEDED = 55_600
"""Draws whose variance lies within 3 % of the true one: its relative standard deviation is sqrt(2 / n), and five of
them are 0.03. One honest case in two million fails."""


class Model(nn.Module):
    """Parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.parts = nn.ParameterList([torch.randn(shape, generator=generator) for shape in SHAPES])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One job; the same on all ranks."""

    strategy: st.Strategy
    ranks: int = 2
    micro_batches: int | st.Clock = 2
    weights: tuple[float, ...] = (1.0,)
    """Of the micro-batches, in turn; each rank begins at its own place."""
    lengths: tuple[int, ...] = ()
    """Updates for which each rank has data; empty where each has them for all."""
    updates: int = UPDATES
    poisoned: tuple[int, ...] = ()
    """Micro-batches whose gradients are not finite."""
    rate: float = 1.0
    options: st.Options = dataclasses.field(default_factory=st.Options)
    guards: tuple[st.Guard, ...] = ()

    def with_noise(self, noise: st.Noise | None, **others: Any) -> "Case":
        return dataclasses.replace(self, options=dataclasses.replace(self.options, noise=noise, **others))


@dataclasses.dataclass
class Seen:
    """What one rank saw."""

    masters: list[Tensor]
    """The elements that this rank owns, without padding, at the start and after every update."""
    padding: Tensor
    """The other elements of its masters in the end."""
    shown: list[Tensor]
    """What the model held after every micro-batch."""
    updates: list[st.Update]


def gradient(rank: int, number: int) -> list[Tensor]:
    """Return what the `number`-th micro-batch of a rank gives as its gradient; under a clock, all give the same."""
    generator = torch.Generator().manual_seed(1000 * rank + number)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def train(case: Case, rank: int, group: dist.ProcessGroup) -> Seen:
    """Train one rank."""
    model = Model()
    parallel = st.DataParallel(
        model,
        torch.optim.SGD(model.parameters(), lr=case.rate),
        case.strategy,
        micro_batches=case.micro_batches,
        group=group,
        options=case.options,
        guards=case.guards,
    )
    seen = Seen([owned(parallel)], torch.zeros(0), [], [])
    count = case.micro_batches if isinstance(case.micro_batches, int) else 1
    length = (case.lengths[rank] if case.lengths else case.updates) * count

    def note(update: st.Update) -> None:
        seen.updates.append(update)
        seen.masters.append(owned(parallel))

    for number in parallel.feed(range(length), case.updates, until="all", on_update=note):
        values = gradient(rank, number) if isinstance(case.micro_batches, int) else gradient(0, 0)
        loss = sum(((p * v).sum() for p, v in zip(model.parts, values, strict=True)), torch.zeros(()))
        if number in case.poisoned:
            loss = loss * math.nan
        parallel.backward(loss, case.weights[(rank + number) % len(case.weights)])
        seen.shown.append(flat(model.parameters()))
    seen.padding = padding(parallel)
    parallel.finish()
    return seen


def run(case: Case, **cluster: Any) -> list[Seen]:
    """Train on all ranks of a virtual cluster."""
    program = VirtualCluster(case.ranks, **cluster).run
    found: list[Seen] = program(lambda rank, group: train(case, rank, group)).values
    return found


def steps(seen: Seen) -> Tensor:
    """What the rank has stepped with at every update, `(updates, elements)`, for a learning rate of 1."""
    return -torch.stack(seen.masters).double().diff(dim=0)


def added(noisy: list[Seen], clean: list[Seen]) -> list[Tensor]:
    """What noise has added to every step of every rank."""
    return [steps(one) - steps(other) for one, other in zip(noisy, clean, strict=True)]


def owned(parallel: st.DataParallel) -> Tensor:
    sharded = parallel.job.sharded
    return torch.cat([sharded.values(sharded.masters, piece) for piece in sharded.pieces]).clone()


def padding(parallel: st.DataParallel) -> Tensor:
    sharded = parallel.job.sharded
    is_padding = [torch.ones_like(master, dtype=torch.bool) for master in sharded.masters]
    for piece in sharded.pieces:
        sharded.values(is_padding, piece).fill_(False)
    return torch.cat([master[mask] for master, mask in zip(sharded.masters, is_padding, strict=True)])


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])
