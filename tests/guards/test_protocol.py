"""Guards are asked at every update boundary, and what they report reaches every rank."""

import functools
import json
from typing import Any

import pytest

import stretto as st
from stretto.errors import ConfigError, RanksDisagree
from stretto.guards import GUARDS
from stretto.records import Incident, Update
from tests.guards.watched import STRATEGIES, Job, Telltale, same
from tests.processes import rank_outcomes, run_ranks

ALL_GUARDS = tuple(kind() for kind in GUARDS.values())


def watched(rank: int) -> dict[str, Any]:
    """Run every strategy with a guard, without, and with one that compares replicas."""
    return {
        name: {
            kind: (job.run(), job.final())
            for kind, choices in {
                "plain": {},
                "guarded": {"guards": (Telltale(),)},
                "all guards": {"guards": ALL_GUARDS},
                "verified": {"options": st.Options(bucket_bytes=1024, verified=True)},
            }.items()
            for job in [Job(strategy, rank, **choices)]
        }
        for name, strategy in STRATEGIES.items()
    }


@functools.cache
def outcome(world_size: int) -> list[dict[str, Any]]:
    return [watched(0)] if world_size == 1 else run_ranks(world_size, watched)


def updates_of(found: dict[str, Any], name: str, kind: str) -> list[Update]:
    updates: list[Update] = found[name][kind][0]
    return updates


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_guard_that_only_looks_leaves_every_bit_as_it_is(name: str, world_size: int) -> None:
    for found in outcome(world_size):
        for kind in ("guarded", "all guards", "verified"):
            assert same(found[name][kind][1], found[name]["plain"][1]), kind


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", STRATEGIES)
def test_guards_are_asked_before_every_step_and_after_every_update(name: str, world_size: int) -> None:
    previews = {"wp": 1, "acco": 1}.get(name, 0)
    for found in outcome(world_size):
        updates = updates_of(found, name, "guarded")
        assert len(updates) >= 4
        for update in updates:
            sites = [incident.site for incident in update.incidents]
            # Reports that say the same are there once: those ahead of a preview and of its step do.
            assert sites == ["before", "after"], (previews, sites)
            assert {incident.step for incident in update.incidents} == {update.step}
            assert update.incidents[1].part == str(world_size)


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_rank_holds_the_same_incidents(name: str) -> None:
    first, second = ([u.incidents for u in updates_of(found, name, "guarded")] for found in outcome(2))
    assert first == second


@pytest.mark.parametrize("name", STRATEGIES)
def test_only_what_is_asked_for_travels(name: str) -> None:
    plain, guarded, verified = (
        [update.sent_bytes for update in updates_of(outcome(2)[0], name, kind)]
        for kind in ("plain", "all guards", "verified")
    )
    replicated = name == "ddp"
    # To one other rank: the length of the incidents, a digest, and where replicas exist what cannot be mended.
    assert [more - few for more, few in zip(guarded, plain, strict=True)] == [16 + 8 * replicated] * len(
        plain
    )
    assert [(more, few) for more, few in zip(verified, plain, strict=True) if not more > few] == []


def test_a_incident_survives_the_way_through_a_record() -> None:
    incident = Incident(
        step=3,
        guard="g",
        site="masters",
        part="bucket 0",
        ranks=(1,),
        link=(1, 0),
        action="mended",
        found="ff",
    )
    assert Incident.from_json(json.loads(json.dumps(incident.as_json()))) == incident
    assert "rank 1 to rank 0" in str(incident)


def differ(rank: int) -> None:
    Job(STRATEGIES["acco"], rank, guards=(Telltale(threshold=rank),))


def test_guards_that_differ_between_ranks_are_an_error_on_every_rank() -> None:
    for found in rank_outcomes(2, differ):
        assert found.error is not None
        assert RanksDisagree.__name__ in found.error
        assert "threshold=1" in found.error


class Overlapping(Telltale):
    overlaps = True


@pytest.mark.parametrize(
    ("strategy", "guard", "reason"),
    [
        ("ddp", Overlapping(), "waits for its communication lane"),
        ("ddp", "rest", "expected .standard. or instances"),
    ],
)
def test_a_guard_that_cannot_work_is_refused(strategy: str, guard: st.Guard, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Job(STRATEGIES[strategy], 0, guards=(guard,))
