"""The library's guards pass the kit for guards, and each broken one fails the checks that it should."""

import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any

import pytest

from stretto import ACCO, DDP, WeightPrediction, ZeRO1
from stretto.errors import CollectivesDisagree, ConformanceFailed
from stretto.guards import GUARDS, AtRest, Audit, Guard, ReplicaGuard
from stretto.guards.contract import Clear, Fingerprint, GuardScript, Inspect, Mend, Part, Report, Seal, Share
from stretto_lab.testing import Damage, GuardConformance
from stretto_lab.testing.conformance import Program
from stretto_lab.testing.jobs import Job
from stretto_lab.virtual import VirtualCluster


@functools.cache
def ran(world_size: int, function: Program, *args: Any) -> Sequence[Any]:
    return VirtualCluster(world_size).run(functools.partial(function, *args)).values


class Kit(GuardConformance):
    """Runs a job once for all the checks that look at it.

    Every guard meets a replicated strategy, one that shows a prediction, and one of two rounds, in one kit or
    another; tests/guards has the others.
    """

    updates = 3
    """The damage comes behind the second; a strategy that commits late needs one more to show it."""

    def _jobs(self) -> list[tuple[Job, int]]:
        return [(dataclasses.replace(job, updates=self.updates), ranks) for job, ranks in super()._jobs()]

    def run_ranks(self, world_size: int, program: Program) -> Sequence[Any]:
        return ran(world_size, program.func, *program.args)


class TestAtRest(Kit):
    strategies = (WeightPrediction(), ACCO())
    updates = 4
    promises = (
        Damage(site="masters", words=40),
        Damage(site="optimizer state"),
        Damage(site="shown parameters"),
    )

    def make_guards(self) -> tuple[Guard, ...]:
        return (AtRest(),)


class TestAudit(Kit):
    strategies = (DDP(), ACCO())
    promises = (Damage(site="gradient"), Damage(site="gradient", words=40))

    def make_guards(self) -> tuple[Guard, ...]:
        return (Audit(rate=1.0),)


class TestAuditOfFewRanks(TestAudit):
    world_sizes = (1, 2)
    strategies = (ZeRO1(), WeightPrediction())
    updates = 4


class TestBothGuards(Kit):
    promises = (
        Damage(site="masters"),
        Damage(site="optimizer state", words=40),
        Damage(site="shown parameters"),
    )
    strategies = (DDP(),)
    world_sizes = (1, 2)

    def make_guards(self) -> tuple[Guard, ...]:
        return (ReplicaGuard(), AtRest())


class TestReplicaGuard(Kit):
    promises = (Damage(site="masters", words=40), Damage(site="optimizer state"))
    strategies = (DDP(),)

    def make_guards(self) -> tuple[Guard, ...]:
        return (ReplicaGuard(),)


class TestReplicaGuardOfTwoRanks(TestReplicaGuard):
    promises = (Damage(site="masters", outcome="ends the job"),)
    world_sizes = (2,)


def test_every_guard_of_the_library_is_checked() -> None:
    assert set(GUARDS.values()) == {AtRest, Audit, ReplicaGuard}


@dataclasses.dataclass(frozen=True)
class SeesNothing(Guard):
    name = "blind"

    def after_update(self) -> GuardScript:
        yield Fingerprint()


@dataclasses.dataclass(frozen=True)
class NamesItsNeighbour(AtRest):
    name = "unjust"

    def _incident(self, difference: Any, action: str) -> Report:
        return dataclasses.replace(super()._incident(difference, action), ranks=(0,))


@dataclasses.dataclass(frozen=True)
class OnlySaysThatItMends(Guard):
    name = "liar"

    def after_update(self) -> GuardScript:
        yield Seal("state")

    def before_step(self) -> GuardScript:
        for difference in (yield Inspect()):
            part = difference.part
            yield Report(guard=self.name, site=part.site, part=part.name, action="mended")


@dataclasses.dataclass(frozen=True)
class CriesWolf(Guard):
    name = "wolf"

    def after_update(self) -> GuardScript:
        yield Report(guard=self.name, site="masters", part="all", action="none")


@dataclasses.dataclass(frozen=True)
class ClearsState(Guard):
    name = "clears"

    def after_update(self) -> GuardScript:
        yield Seal("state")
        yield Clear(Part("masters", "bucket 0"))


@dataclasses.dataclass(frozen=True)
class AsksWhereItFindsSomething(Guard):
    name = "split"

    def after_update(self) -> GuardScript:
        yield Seal("state")

    def before_step(self) -> GuardScript:
        for difference in (yield Inspect()):
            yield Share(b"help")
            yield Mend(difference.part)


@dataclasses.dataclass(frozen=True)
class Remembers(Guard):
    seen: list[int] = dataclasses.field(default_factory=lambda: [len(MADE)])
    name = "remembers"

    def after_update(self) -> GuardScript:
        self.seen.append(0)
        yield Fingerprint()


MADE: list[Guard] = []


class Broken(GuardConformance):
    promises = (Damage(site="masters"),)
    strategies = (ZeRO1(),)
    kind: type[Guard]

    def make_guards(self) -> tuple[Guard, ...]:
        MADE.append(self.kind())
        return (MADE[-1],)


BROKEN = [
    (SeesNothing, "test_damage_is_noticed", "expected an incident on it by update 3, found none"),
    (NamesItsNeighbour, "test_damage_is_noticed", "ranks named: expected {1}, found {0}"),
    (OnlySaysThatItMends, "test_repaired_runs", "masters repaired in zero1, rank 0 of 3"),
    (
        CriesWolf,
        "test_a_clean_run_raises",
        "incidents of a clean run of zero1, rank 0 of 3: expected [], found",
    ),
    (ClearsState, "test_a_clean_run_is", "zero1 with guards, rank 0 of 3"),
    (Remembers, "test_options_decide", "guards made again"),
]


def check_of(kit: GuardConformance, prefix: str) -> Any:
    (name,) = (name for name in kit.checks() if name.startswith(prefix))
    return getattr(kit, name)


@pytest.mark.parametrize(
    ("kind", "check", "message"), BROKEN, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_broken_guard_fails_the_check_that_names_its_fault(
    kind: type[Guard], check: str, message: str
) -> None:
    kit = Broken()
    kit.kind = kind
    with pytest.raises(ConformanceFailed, match=re.escape(message)):
        check_of(kit, check)()


def test_a_guard_that_asks_on_one_rank_only_is_stopped_by_the_cluster() -> None:
    kit = Broken()
    kit.kind = AsksWhereItFindsSomething
    with pytest.raises(CollectivesDisagree):
        check_of(kit, "test_damage_is_noticed")()


def test_damage_that_does_no_harm_is_no_check() -> None:
    kit = TestAtRest()
    kit.promises = (Damage(site="masters", behind=99),)
    with pytest.raises(ConformanceFailed, match="expected another run, found the clean one"):
        check_of(kit, "test_damage_that_is_planted")()
