"""Strategies that must not pass: each breaks one rule."""

import dataclasses
from typing import Any

import torch

from stretto import ACCO, DPU, ZeRO1
from stretto.strategies import Strategy
from stretto.strategies.contract import AllReduce, Gather, Preview, Reduce, Script, Step


@dataclasses.dataclass(frozen=True)
class ReusesAStaleGradient(Strategy):
    """Steps with the gradient of the update before, which it has kept."""

    kept: list[Any] = dataclasses.field(default_factory=list, repr=False, compare=False)
    name = "stale"
    overlaps = False
    staleness = 0

    def update(self) -> Script:
        gradient = yield Reduce()
        before = [kept for kept in self.kept if type(kept) is type(gradient)]  # not what a ledger has given
        self.kept.append(gradient)
        yield Step(before[-1] if before else gradient)
        yield Gather()


@dataclasses.dataclass(frozen=True)
class DropsAGradient(ACCO):
    """Estimates with one half of the batch, and commits the other half only."""

    name = "drops"

    def update(self) -> Script:
        at_estimate = yield Reduce()
        yield Preview(at_estimate)
        yield Gather()
        at_committed = yield Reduce()
        yield Step(at_committed)
        yield Gather()


@dataclasses.dataclass(frozen=True)
class UsesAPartAgain(ACCO):
    """Previews a gradient that it has added to another."""

    name = "again"

    def update(self) -> Script:
        first = yield Reduce()
        yield Preview(first)
        yield Gather()
        total = first + (yield Reduce())
        yield Step(total)
        yield Preview(first)
        yield Gather()


@dataclasses.dataclass(frozen=True)
class VariesItsRounds(Strategy):
    """Two rounds in every fifth update, one in the others: more rarely than a ledger looks."""

    updates: list[int] = dataclasses.field(default_factory=list, repr=False, compare=False)
    name = "varies"
    overlaps = False
    staleness = 0

    def update(self) -> Script:
        self.updates.append(len(self.updates))
        gradient = yield Reduce()
        if len(self.updates) % 5 == 0:
            yield Preview(gradient)
            yield Gather()
            gradient = gradient + (yield Reduce())
        yield Step(gradient)
        yield Gather()


@dataclasses.dataclass(frozen=True)
class TossesACoin(Strategy):
    """Lets the random state of its process decide which effects to ask for."""

    name = "coin"
    overlaps = False
    staleness = 0

    def update(self) -> Script:
        gradient = yield AllReduce()
        yield Step(gradient)
        if torch.rand(()) < 0.5:
            yield Preview(gradient)


@dataclasses.dataclass(frozen=True)
class ClaimsToBeFresh(DPU):
    """One update late, and says it is not."""

    name = "fresh"
    staleness = 0


@dataclasses.dataclass(frozen=True)
class ClaimsToBeStale(ZeRO1):
    """Synchronous, and says it is one update late."""

    name = "late"
    staleness = 1


@dataclasses.dataclass(frozen=True)
class LetsRanksDiverge(Strategy):
    """Shows a preview instead of what it has committed wherever the process's random state says so."""

    name = "diverges"
    overlaps = False
    staleness = 0

    def update(self) -> Script:
        first = yield AllReduce()
        yield Preview(first)
        second = yield AllReduce()
        yield Step(first if torch.rand(()) < 0.5 else second)


@dataclasses.dataclass(frozen=True)
class YieldsNoEffect(Strategy):
    """Asks for something that does not exist."""

    name = "unknown"
    overlaps = False
    staleness = 0

    def update(self) -> Script:
        gradient = yield Reduce()
        yield "step"  # type: ignore[misc]  # on purpose
        yield Step(gradient)
        yield Gather()


@dataclasses.dataclass(frozen=True)
class ForgetsToGather(Strategy):
    """Steps, and shows the gradients."""

    name = "shows"
    overlaps = False
    staleness = 0

    def update(self) -> Script:
        yield Step((yield Reduce()))


@dataclasses.dataclass(frozen=True)
class SplitsUnevenly(ACCO):
    """Gives its first round all micro-batches."""

    name = "splits"

    def quotas(self, micro_batches: int, rounds: int) -> tuple[int, ...]:
        return (micro_batches, *[0] * (rounds - 1))
