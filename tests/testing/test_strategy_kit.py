"""The library's strategies pass the kit for strategies, and each broken one fails the checks that it should."""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import pytest

from stretto import ACCO, DDP, DPU, PAFTDyn, PAFTSync, WeightPrediction, ZeRO1
from stretto.errors import ConformanceFailed
from stretto.strategies import STRATEGIES, Strategy
from stretto.strategies.ledger import ledger_of
from stretto_lab.testing import StrategyConformance
from stretto_lab.testing.conformance import Program
from stretto_lab.testing.jobs import Job
from stretto_lab.testing.tracer import Plan, trace
from stretto_lab.virtual import VirtualCluster
from tests.processes import run_program
from tests.testing.broken_strategies import (
    ClaimsToBeFresh,
    ClaimsToBeStale,
    DropsAGradient,
    ForgetsToGather,
    LetsRanksDiverge,
    ReusesAStaleGradient,
    SplitsUnevenly,
    TossesACoin,
    UsesAPartAgain,
    VariesItsRounds,
    YieldsNoEffect,
)


@functools.cache
def traced(world_size: int, plan: Plan) -> Sequence[Any]:
    return VirtualCluster(world_size).run(functools.partial(trace, plan)).values


class Kit(StrategyConformance):
    """Traces a job once for all the checks that look at it; the perceptron is trained as often as the checks ask."""

    world_sizes = (1, 3)
    micro_batches = 2
    updates = 3
    """Of the perceptron: enough for a save at the start and one with momentum, and for a way to go from there."""
    strategy: Strategy

    def _job(self, *, looks: bool = True) -> Job:
        return dataclasses.replace(super()._job(looks=looks), updates=self.updates)

    def run_ranks(self, world_size: int, program: Program) -> Sequence[Any]:
        if program.func is trace:
            return traced(world_size, *program.args)
        return super().run_ranks(world_size, program)

    def make_strategy(self) -> Strategy:
        return self.strategy


class TestDDP(Kit):
    strategy = DDP()


class TestZeRO1(Kit):
    strategy = ZeRO1()


class TestDPU(Kit):
    strategy = DPU()
    world_sizes = (1, 2)


class TestWeightPrediction(Kit):
    strategy = WeightPrediction()


class TestACCO(Kit):
    strategy = ACCO()
    micro_batches = 4  # two to each of its rounds


class TestPAFTSync(Kit):
    strategy = PAFTSync(interval=2)
    world_sizes = (1, 2)


class TestPAFTDyn(Kit):
    strategy = PAFTDyn(first=1, maximum=2)


class TestOverlappedPAFTSync(Kit):
    strategy = PAFTSync(interval=2, overlap=True)
    world_sizes = (2,)
    updates = 4  # an average lands an update later


class TestACCOOnGloo(Kit):
    strategy = ACCO()
    world_sizes = (2,)

    def run_ranks(self, world_size: int, program: Program) -> Sequence[Any]:
        return run_program(world_size, program)


def test_every_strategy_that_keeps_ranks_alike_is_checked() -> None:
    checked = {kit.strategy.name for kit in Kit.__subclasses__() if kit.__name__.startswith("Test")}
    assert checked == {name for name, kind in STRATEGIES.items() if not ledger_of(kind()).local}


class Broken(Kit):
    """Makes a new strategy every time, as a user's kit would."""

    world_sizes = StrategyConformance.world_sizes
    micro_batches = StrategyConformance.micro_batches
    updates = 4
    kind: type[Strategy]

    def make_strategy(self) -> Strategy:
        return self.kind()


BROKEN = [
    (YieldsNoEffect, "test_effects_are_known", "update 0, effect 2: 'step': expected one of the effects"),
    (ForgetsToGather, "test_effects_are_known", "a Gather after Reduce"),
    (ReusesAStaleGradient, "test_gradients_are_passed_on", "update 0, rounds [0], expected one of update 1"),
    (ReusesAStaleGradient, "test_every_micro_batch", "micro-batch"),
    (DropsAGradient, "test_gradients_are_passed_on", "the gradients of rounds [0] reached no Step"),
    (DropsAGradient, "test_every_micro_batch", "rank 0 of 1: expected to be applied 1 times, found 0 times"),
    (UsesAPartAgain, "test_gradients_are_passed_on", "which had been added to another: expected the sum"),
    (VariesItsRounds, "test_rounds_per_update", "expected [1, 1, 1, 1, 1, 1, 1, 1], found [1, 1, 1, 1, 2, 1, 1, 1]"),
    (TossesACoin, "test_equal_options", "effects of the same strategy, read again"),
    (SplitsUnevenly, "test_micro_batches_are_split", "quotas of 4 micro-batches in 2 rounds, found (4, 0)"),
    (ClaimsToBeFresh, "test_staleness", "largest staleness of updates 1 to 5 on 1 ranks: expected 0, found 1"),
    (ClaimsToBeStale, "test_staleness", "largest staleness of updates 1 to 6 on 1 ranks: expected 1, found 0"),
    (LetsRanksDiverge, "test_committed_parameters_are_equal", "rank 1 of 2, against rank 0, state committed"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "check", "message"), BROKEN, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_broken_strategy_fails_the_check_that_names_its_fault(
    kind: type[Strategy], check: str, message: str
) -> None:
    kit = Broken()
    kit.kind = kind
    (name,) = (name for name in kit.checks() if name.startswith(check))
    with pytest.raises(ConformanceFailed, match=re.escape(message)):
        getattr(kit, name)()
