"""Jobs of random rounds whose gradients are known, and the account of what was contributed, received and still owed."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import stretto
from stretto import checkpoint
from stretto.engine.round import Round
from stretto.strategies import STRATEGIES
from stretto_lab.virtual import VirtualCluster
from tests.exchange.values import of_every_size

SHAPES = ((70,), (3, 5), (130,))
WEIGHTS = (0.0, 1.0, 257.0, 1e-30, 2.0**60, 0.3)
LARGEST = 3e37
"""Of a contribution: a few of them on four ranks can be added."""


@dataclasses.dataclass(frozen=True)
class Course:
    """One job, in parts that are saved and resumed, each at its own world size."""

    seed: int
    strategy: str
    wire: str
    world_sizes: tuple[int, ...]
    dtype: torch.dtype
    verified: bool
    updates: int = 2
    """Of each part."""
    ranks_per_node: int | None = None

    @property
    def options(self) -> stretto.Options:
        return stretto.Options(
            wire=self.wire, verified=self.verified, nonfinite="skip", allow_unused=True,
            bucket_bytes=512, accumulate="parameter", clip_norm=1.0,
            ranks_per_node=self.ranks_per_node,
        )  # fmt: skip


@dataclasses.dataclass
class Account:
    """Sums over rounds that counted, in float64, by parameter."""

    contributed: dict[str, Tensor]
    """By this rank."""
    received: dict[str, Tensor]
    """In the slices that this rank owns."""
    residuals: dict[str, Tensor]
    """By this rank, at the end."""
    bound: dict[str, Tensor]
    """How far rounding may have brought the two sides apart, as far as this rank's contributions say."""
    rounds: int = 0
    left_out: int = 0
    squares: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """Sums over rounds of the squares of what this rank has contributed, flat."""


def zeros(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}


class Bookkeeper:
    """Stands beside a job's reductions and writes down what goes in and what comes out."""

    def __init__(self, parallel: stretto.DataParallel, model: nn.Module, course: Course) -> None:
        self.job, self.rounds = parallel.job, course
        self.account = Account(*(zeros(model) for _ in range(4)))
        self._reduce, self._is_open = self.job.replica.reduce, True
        self.job.replica.reduce = self._noted

    def close(self) -> Account:
        """Write down the debts, and nothing more."""
        if self.job.exchange.feedback is not None and self._is_open:
            for name, residuals in self.job.exchange.feedback.state_dict().items():
                self.account.residuals[name] = residuals.detach().double()
        self._is_open = False
        return self.account

    def _noted(self, round: Round) -> None:
        layout, account = self.job.layout, self.account
        before = [flat.to(torch.float64, copy=True) for flat in round.buffer.flats]
        used = bytes(round.contribution.used)
        self._reduce(round)
        if not self._is_open:
            return
        account.rounds += 1
        account.left_out += round.skipped
        if round.skipped:
            return
        for slot in layout.slots:
            own = before[slot.set_index][slot.start : slot.stop].view(slot.shape)
            account.contributed[slot.name] += own
            account.squares[slot.name] = account.squares.get(slot.name, 0.0) + own.square().view(-1)
            if used[slot.index]:
                account.bound[slot.name] += own.abs().max() if own.numel() else 0.0
        pieces = (
            self.job.sharded.pieces if self.job.exchange.rank == 0 or not self.job.replica.replicated else []
        )
        for piece in pieces:
            if round.gradient.used[piece.slot.index]:
                values = self.job.sharded.values(round.gradient.sums, piece).double()
                place = slice(piece.offset, piece.offset + piece.numel)
                account.received[piece.slot.name].view(-1)[place] += values


class Still(torch.optim.Optimizer):
    """Does not step: the account is about sums, and their means may be too large for any step."""

    def __init__(self, params: Any, lr: float = 0.0) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        pass


def micro_batch(model: nn.Module, course: Course, draws: torch.Generator) -> tuple[Tensor, float]:
    """Return a loss whose weighted gradients are random values of every size, and its weight."""
    weight = WEIGHTS[int(torch.randint(len(WEIGHTS), (), generator=draws))]
    is_bad = torch.rand((), generator=draws) < 0.05
    terms = []
    for parameter in model.parameters():
        if torch.rand((), generator=draws) < 0.35:
            continue
        values = of_every_size(parameter.numel(), draws, largest=LARGEST).double()
        if weight:
            values = values / weight
        values = values.clamp(-LARGEST, LARGEST).to(course.dtype)
        if is_bad:
            values[0] = math.inf
        terms.append((parameter * values.view(parameter.shape)).sum())
    return (sum(terms, torch.zeros(())), weight) if terms else (next(model.parameters()).sum() * 0.0, 0.0)


def part(course: Course, number: int, place: Path, rank: int, group: Any) -> Account:
    """Train one part of the course on one rank, from the checkpoint of the part before it; save at its end."""
    model = nn.ParameterDict({f"p{i}": nn.Parameter(torch.zeros(shape)) for i, shape in enumerate(SHAPES)})
    model = model.to(course.dtype)
    optimizer = Still(model.parameters())
    parallel = stretto.DataParallel(
        model, optimizer, STRATEGIES[course.strategy](), micro_batches=2, group=group, options=course.options
    )
    books = Bookkeeper(parallel, model, course)
    if number:
        checkpoint.load(parallel, place)
    draws = torch.Generator().manual_seed(1000 * course.seed + 10 * number + rank)
    for _ in range(4 * course.updates):  # rounds that are left out may need more
        loss, weight = micro_batch(model, course, draws)
        update = parallel.backward(loss, weight=weight)
        if update is not None and update.step >= (number + 1) * course.updates:
            break
    if update is not None and len(course.world_sizes) > 1:
        checkpoint.save(parallel, place)
        books.close()
    parallel.finish()
    return books.close()


def settled(course: Course, place: Path) -> list[list[Account]]:
    """Run all parts on virtual clusters; return the accounts of every rank of each."""
    parts = []
    for number, world_size in enumerate(course.world_sizes):
        cluster = VirtualCluster(world_size, seed=course.seed)
        found = cluster.run(lambda rank, group, n=number: part(course, n, place, rank, group))
        parts.append(list(found.values))
        if len(list(checkpoint.complete(place))) <= number:  # too many rounds were left out to save this part
            break
    return parts


def error(course: Course, parts: list[list[Account]]) -> float:
    """Return how far Σ received + owed is from Σ contributed, as a multiple of what rounding allows.

    Over R rounds of N ranks, with G the sum over rounds of a parameter's largest contributions: adding an error to a
    contribution rounds once, and a sum rounds N - 1 times, each by at most 2^-24 of 1.2·G (an error is at most a
    seventh of the largest value so far). Values that
    come back in 16 bits, or travel in 16 bits without feedback, are rounded by 2^-9 of themselves. Below the smallest
    normal numbers steps are 2^-149, or 2^-133 in 16 bits.
    """
    accounts = list(itertools.chain.from_iterable(parts))
    rounds = max(account.rounds for account in accounts)
    is_replicated = course.strategy in ("ddp", "paft-sync", "paft-dyn")
    is_short = (
        course.wire == "bf16" or course.dtype == torch.bfloat16 or (is_replicated and course.wire != "fp32")
    )
    worst = 0.0
    for name in accounts[0].contributed:
        contributed = sum(account.contributed[name] for account in accounts)
        received = sum(account.received[name] for account in accounts)
        residuals = sum(account.residuals[name] for account in parts[-1])
        size = sum(account.bound[name] for account in accounts)
        unit, smallest = (2.0**-8, 2.0**-133) if is_short else (2.0**-23, 2.0**-149)
        bound = 1.2 * unit * (len(parts[0]) + 2) * size + 4 * rounds * smallest
        worst = max(worst, float(((received + residuals - contributed).abs() / bound).max()))
    return worst
