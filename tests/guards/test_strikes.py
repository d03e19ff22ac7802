"""Who is named too often ends the job: on all ranks at the same update, with rank or link, host and device."""

import contextlib
import dataclasses
import pickle
import platform
from typing import Any

import pytest

import stretto as st
from stretto.errors import ConfigError, Quarantined, TransferCorrupt
from stretto.guards.strikes import COUNTS_FOR, Strikes, blame, laid_to
from stretto.records import Incident
from stretto_lab.faults import Fault
from stretto_lab.faults.plan import WireSite
from tests.guards.watched import struck

RANKS, STRUCK = 3, 1
STICKY_MASTERS = Fault(site="masters", rank=STRUCK, instant=2, lasts="sticky", seed=5)


def ended(
    fault: Fault, strategy: st.Strategy, *, ranks: int = RANKS, **options: Any
) -> list[tuple[int, Exception | None]]:
    """Train with a fault; return every rank's last update, and what ended its job."""
    chosen = st.Options(verified=True, **options)
    seen = struck(strategy, fault, ranks=ranks, length=24, guards=(st.AtRest(),), options=chosen)
    return [(len(one.losses), one.error) for one in seen]


@pytest.mark.parametrize("strategy", [st.DDP(), st.ZeRO1(), st.ACCO(), st.WeightPrediction()])
def test_the_third_strike_ends_the_job_on_all_ranks_at_the_same_update(strategy: st.Strategy) -> None:
    (first, error), *others = ended(STICKY_MASTERS, strategy, strikes=3)
    assert isinstance(error, Quarantined)
    assert (error.ranks, error.links) == ((STRUCK,), ())
    steps = [incident.step for incident in error.incidents]
    assert len(set(steps)) == 3
    assert first in (max(steps), max(steps) - 1)  # an overlap has the next round under way
    for last, seen in others:
        assert last == first
        assert isinstance(seen, Quarantined)
        assert seen.incidents == error.incidents


def test_the_message_names_rank_host_device_and_every_strike() -> None:
    _, error = ended(STICKY_MASTERS, st.ZeRO1(), strikes=2)[0]
    message = str(error)
    assert f"rank 1 (host {platform.node()}, cpu) reached 2 strikes within 1000 updates" in message
    assert message.count("masters damaged") == 2


def test_without_a_limit_damage_is_mended_for_ever() -> None:
    assert {error for _, error in ended(STICKY_MASTERS, st.ZeRO1())} == {None}


def test_old_strikes_are_forgotten() -> None:
    for gap, error in ((COUNTS_FOR - 1, Quarantined), (COUNTS_FOR, None)):
        strikes = Strikes(2, ["a host"] * 2)
        for step in (7, 7 + gap):
            strikes.note(step, [dataclasses.replace(incident(step), ranks=(1,), link=None)])
        with pytest.raises(error) if error else contextlib.nullcontext():
            strikes.check(7 + gap)


def test_a_rank_whose_memory_damages_what_arrives_is_told_from_its_links() -> None:
    # Every other arrival, so that what is sent again arrives.
    often = Fault(site="contribution", rank=STRUCK, lasts="bursts", burst=1, extent="all")
    for _, error in ended(often, st.ZeRO1(), strikes=3):
        assert isinstance(error, Quarantined)
        assert (error.ranks, error.links) == ((STRUCK,), ())


@pytest.mark.parametrize(("site", "instant"), [("contribution", 4), ("round report", 12)])
def test_what_never_arrives_is_laid_to_the_rank_at_which_all_of_it_ends(site: WireSite, instant: int) -> None:
    always = Fault(site=site, rank=STRUCK, instant=instant, lasts="sticky", extent="all")
    # Whoever finds it first ends the job for the others.
    found = [error for _, error in ended(always, st.ZeRO1()) if isinstance(error, TransferCorrupt)]
    assert found
    for error in found:
        assert set(error.links) == {(sender, STRUCK) for sender in range(RANKS)}
        assert set(blame(error.links).values()) == {STRUCK}


@pytest.mark.parametrize(
    ("links", "laid"),
    [
        ([(0, 1)], [(0, 1)]),
        ([(0, 1), (1, 0)], [(0, 1), (1, 0)]),
        ([(0, 1), (2, 3)], [(0, 1), (2, 3)]),
        ([(1, 1)], [1]),
        ([(0, 1), (2, 1)], [1, 1]),
        ([(1, 0), (1, 2)], [1, 1]),
        ([(0, 1), (1, 1)], [1, 1]),
        # Two bad receivers: rank 0, which sends to both, is not to blame.
        ([(0, 1), (1, 1), (2, 1), (0, 2), (2, 2)], [1, 1, 1, 2, 2]),
    ],
)
def test_links_are_laid_to_the_end_that_they_share(
    links: list[tuple[int, int]], laid: list[int | tuple[int, int]]
) -> None:
    found = blame(links)
    assert [found[link] for link in links] == laid


def incident(step: int, **fields: Any) -> Incident:
    settings = {"guard": "rest", "site": "masters", "part": "bucket 0", "ranks": (1,), "action": "mended"}
    return Incident(step=step, **{**settings, **fields})


def test_an_update_is_one_strike_however_much_it_damaged() -> None:
    several = [incident(4), incident(4, part="bucket 1"), incident(5)]
    assert laid_to(several) == {1: {4: several[0], 5: several[2]}}


def test_a_incident_that_names_nobody_strikes_nobody() -> None:
    assert laid_to([incident(4, ranks=())]) == {}


def test_an_error_keeps_what_it_names_on_its_way_between_processes() -> None:
    error = Quarantined("why", ranks=[1], links=[(0, 1)], incidents=[incident(3)])
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.ranks, copy.links, copy.incidents) == ("why", (1,), ((0, 1),), (incident(3),))


def test_a_limit_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected at least 1"):
        st.Options(strikes=0)


def test_a_lone_rank_is_struck_like_any_other() -> None:
    ((_, error),) = ended(dataclasses.replace(STICKY_MASTERS, rank=0), st.DDP(), ranks=1, strikes=3)
    assert isinstance(error, Quarantined)
    assert error.ranks == (0,)
