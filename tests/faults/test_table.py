"""The table in docs/guards.md is what happens: every fault, with all guards that apply."""

import dataclasses
import functools

import pytest

from stretto.campaign.promises import AUDITED, PROMISES, STRATEGIES_OF, WORDS
from stretto.faults import Fault
from stretto.faults.plan import SITES, Site
from tests.docs.pages import DOCS, table
from tests.faults.struck import Case, Outcome, equal, run_all
from tests.guards.watched import STRATEGIES
from tests.processes import run_ranks

WORLD_SIZE = 3
RANK = 1
"""Whose memory is damaged, in every case."""

TRIED_EXTENTS = {"element": ("element",), "chunk": ("chunk",), "any": ("element", "chunk")}
INSTANTS: dict[Site, int] = {"round report": 9, "optimizer state": 2}
"""The opportunity that is hit, where it is not the second: after the start, and once there is state."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table, for one strategy and extent."""

    case: Case
    seen_by: str
    named: str
    final: str


def expected_rows() -> list[Row]:
    """Return the rows of the page, one by one."""
    return [
        Row(
            case=Case(strategy=strategy, fault=fault(promise.site, extent), audited=promise is AUDITED),
            seen_by=promise.seen_by or "-",
            named=promise.named or "-",
            final=promise.endings[0] if promise.endings else "not seen",
        )
        for promise in (*PROMISES, AUDITED)
        for strategy in STRATEGIES_OF[promise.strategies]
        for extent in TRIED_EXTENTS[promise.extent]
    ]


def fault(site: Site, extent: str) -> Fault:
    """Return a fault that surely changes bits, and no value into one that is not finite: that would be seen anyway."""
    instant = INSTANTS.get(site, 1)
    if extent == "element":
        return Fault(site=site, rank=RANK, instant=instant, extent="element", pattern="sign", seed=4)
    return Fault(
        site=site, rank=RANK, instant=instant, extent="chunk", chunk_bytes=10**6, pattern="sign", seed=4
    )


ALL_ROWS = expected_rows()
TRIED = ("ddp", "acco")
"""Strategies that the rows are tried on: the replicated one, and the sharded one with most going on in an update."""
ROWS = [row for row in ALL_ROWS if row.case.strategy in TRIED]
CLEAN = [Case(strategy=name, fault=None, guarded=guarded) for name in TRIED for guarded in (True, False)]


@functools.cache
def outcomes() -> list[list[Outcome]]:
    """Return what every rank saw of all clean cases, then of all rows."""
    cases = [*CLEAN, *(row.case for row in ROWS)]
    return run_ranks(WORLD_SIZE, run_all, cases)


def found(index: int) -> list[Outcome]:
    """Return what every rank saw of a row."""
    return [of_rank[len(CLEAN) + index] for of_rank in outcomes()]


def clean(strategy: str, rank: int = 0) -> Outcome:
    """Return a clean and guarded run."""
    return outcomes()[rank][CLEAN.index(Case(strategy=strategy, fault=None))]


def describe(index: int) -> str:
    """Return a name for a row."""
    case = ROWS[index].case
    assert case.fault is not None
    return f"{case.strategy}-{case.fault.site}-{case.fault.extent}" + "-audited" * case.audited


EVERY_ROW = pytest.mark.parametrize("index", range(len(ROWS)), ids=describe)


def test_the_page_says_what_is_promised() -> None:
    page = [tuple(row.values()) for row in table(DOCS / "guards.md", "tests/faults/test_table.py")]
    assert page == [promise.cells for promise in (*PROMISES, AUDITED)]


def test_every_site_of_a_fault_that_our_exchanges_have_is_in_the_table() -> None:
    # An all-reduce of the backend's own is what no verified exchange uses.
    assert set(WORDS) == set(SITES) - {"all-reduced values"}
    pairs = {(row.case.strategy, row.case.fault.site) for row in ALL_ROWS if row.case.fault is not None}
    assert pairs == {(name, site) for name in STRATEGIES for site in WORDS}
    assert set(STRATEGIES_OF["all"]) == set(STRATEGIES)


@pytest.mark.parametrize("name", TRIED)
def test_guards_change_nothing_and_say_nothing_where_nothing_is_wrong(name: str) -> None:
    unguarded = outcomes()[0][CLEAN.index(Case(strategy=name, fault=None, guarded=False))]
    assert equal(clean(name), unguarded)
    assert clean(name).incidents == []


@EVERY_ROW
def test_the_fault_is_there(index: int) -> None:
    assert [application.changed for application in found(index)[RANK].applications] == [True]


@EVERY_ROW
def test_it_is_seen_by_whom_the_table_says(index: int) -> None:
    row, results = ROWS[index], found(index)
    if row.final == "error":
        assert all(result.error is not None for result in results)
        return
    assert [result.error for result in results] == [None] * WORLD_SIZE
    assert all(result.incidents == results[0].incidents for result in results)
    # Starting values are sent again before there is anything to report to.
    silent = row.seen_by == "-" or row.named == "-"
    assert {incident.guard for incident in results[0].incidents} == (set() if silent else {row.seen_by})


@EVERY_ROW
def test_it_is_laid_to_the_right_rank_or_link(index: int) -> None:
    row, results = ROWS[index], found(index)
    if row.named == "rank":
        assert {incident.ranks for incident in results[0].incidents} == {(RANK,)}
    if row.named == "link":
        links = [incident.link for incident in results[0].incidents]
        assert all(link is not None and link[1] == RANK for link in links)
        assert [incident.ranks for incident in results[0].incidents] == [(link[0],) for link in links if link]
    if row.final == "error":
        own = results[RANK].error
        assert own is not None
        assert f"rank {RANK}" in own


@EVERY_ROW
def test_the_final_parameters_are_what_the_table_says(index: int) -> None:
    row, results = ROWS[index], found(index)
    same = {equal(result, clean(row.case.strategy, rank)) for rank, result in enumerate(results)}
    assert same == {row.final == "identical"}
