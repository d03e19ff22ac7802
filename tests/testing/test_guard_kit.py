"""The library's guards keep the laws of guards, and each broken one breaks the law that it should."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from stretto import ACCO, DDP, WeightPrediction, ZeRO1
from stretto.errors import CollectivesDisagree
from stretto.guards import GUARDS, AtRest, Audit, Guard, ReplicaGuard
from stretto.guards.contract import Clear, Fingerprint, GuardScript, Inspect, Mend, Part, Report, Seal, Share
from stretto_lab.testing import Damage, guard_faults
from tests.draws import part

MASTERS, MANY_MASTERS = Damage(site="masters"), Damage(site="masters", words=40)
STATE, SHOWN = Damage(site="optimizer state"), Damage(site="shown parameters")
GRADIENTS = (Damage(site="gradient"), Damage(site="gradient", words=40))
AUDIT = (Audit(rate=1.0),)
SOUND: list[tuple[tuple[Guard, ...], Sequence[Damage], dict[str, Any]]] = [
    ((AtRest(),), (MANY_MASTERS, STATE, SHOWN), {"strategies": (WeightPrediction(), ACCO()), "updates": 4}),
    (AUDIT, GRADIENTS, {"strategies": (DDP(), ACCO())}),
    (AUDIT, GRADIENTS, {"strategies": (ZeRO1(), WeightPrediction()), "ranks": (1, 2), "updates": 4}),
    (
        (ReplicaGuard(), AtRest()),
        (MASTERS, Damage(site="optimizer state", words=40), SHOWN),
        {"strategies": (DDP(),), "ranks": (1, 2)},
    ),
    ((ReplicaGuard(),), (MANY_MASTERS, STATE), {"strategies": (DDP(),)}),
    (
        (ReplicaGuard(),),
        (Damage(site="masters", outcome="ends the job"),),
        {"strategies": (DDP(),), "ranks": (2,)},
    ),
]
"""The damage comes behind the second update; a strategy that commits late needs one more than three to show it.

Every guard meets a replicated strategy, one that shows a prediction, and one of two rounds, in one row or another;
tests/guards has the others.
"""


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(("guards", "promises", "choices"), SOUND)
def test_guards_of_ours_keep_the_laws(
    guards: tuple[Guard, ...], promises: Sequence[Damage], choices: dict[str, Any]
) -> None:
    strategies = part(choices["strategies"])
    assert guard_faults(lambda: guards, promises, **{"updates": 3, **choices, "strategies": strategies}) == []


def test_every_guard_of_the_library_is_checked() -> None:
    assert set(GUARDS.values()) == {type(guard) for guards, *_ in SOUND for guard in guards}


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


def made(kind: type[Guard]) -> tuple[Guard]:
    MADE.append(kind())
    return (MADE[-1],)


BROKEN = [
    (SeesNothing, "expected an incident on it by the next update, found []"),
    (NamesItsNeighbour, "expected an incident on it by the next update, found [Incident"),
    (OnlySaysThatItMends, "masters damaged after update 2 in zero1, rank 1 of 3, repaired, on rank 0"),
    (CriesWolf, "a clean zero1, rank 0 of 3: expected no incident, found"),
    (ClearsState, "a clean zero1, rank 0 of 3, with guards"),
    (Remembers, "after pickling"),
]


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(("kind", "words"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_a_broken_guard_breaks_the_law_that_names_its_fault(kind: type[Guard], words: str) -> None:
    faults = guard_faults(lambda: made(kind), (MASTERS,), strategies=(ZeRO1(),), updates=3)
    assert any(words in text for text in faults), faults


def test_a_guard_that_asks_on_one_rank_only_is_stopped_by_the_cluster() -> None:
    with pytest.raises(CollectivesDisagree):
        guard_faults(lambda: made(AsksWhereItFindsSomething), (MASTERS,), strategies=(ZeRO1(),), updates=3)


def test_damage_that_does_no_harm_is_no_check() -> None:
    harmless = Damage(site="masters", behind=99)
    (fault,) = guard_faults(lambda: (AtRest(),), (harmless,), strategies=(ZeRO1(),), updates=3)
    assert fault.endswith("expected harm without guards, found the clean job")
