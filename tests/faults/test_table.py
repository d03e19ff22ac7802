"""The table in docs/guards.md is what happens: every fault, with all guards that apply."""

import dataclasses
import functools

import pytest

from experiments.campaign.drawing import JobKind
from experiments.campaign.promises import (
    AUDITABLE,
    AUDITED,
    PROMISES,
    STRATEGIES_OF,
    WORDS,
    Promise,
)
from experiments.campaign.trial import RankResult, Trial, run_virtual
from stretto.guards import Audit
from stretto_lab.faults import Fault
from stretto_lab.faults.plan import SITES, Pattern, Site
from tests.docs.pages import DOCS, table
from tests.train.tiny import Tiny

WIDE = Tiny(width=9000, dropout=0.0)
"""Enough for damage that is too large to be mended, in frozen parameters and buffers too."""
RANKS, STRUCK = 3, 1
TRIED = ("ddp", "acco")
"""A replicated strategy, and the sharded one with most going on in an update. Campaigns try all."""
TRIED_EXTENTS = {"element": ("element",), "chunk": ("chunk",), "any": ("element", "chunk")}
INSTANTS: dict[Site, int] = {"round report": 12, "optimizer state": 2, "buffers": 3, "broadcast values": 0}
"""The opportunity that is hit, where it is not the second: after the start, and once there is state."""
CHUNK_PATTERNS: dict[Site, Pattern] = {"masters": "shifted", "error memory": "misread"}
"""What becomes of a chunk, where it is not other signs: many sets of those explain the same sums, and trying them takes
seconds."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the table, for one strategy and extent."""

    promise: Promise
    strategy: str
    extent: str

    def __str__(self) -> str:
        return f"{self.strategy}-{self.promise.site}-{self.extent}" + "-audited" * (self.promise is AUDITED)

    @property
    def fault(self) -> Fault:
        """A fault that surely changes bits, and no value into one that is not finite: that would be seen anyway."""
        site = self.promise.site
        instant = INSTANTS.get(site, 1)
        if self.extent == "element":
            return Fault(site=site, rank=STRUCK, instant=instant, pattern="sign", seed=4)
        return Fault(
            site=site,
            rank=STRUCK,
            instant=instant,
            extent="chunk",
            chunk_bytes=10**6,
            pattern=CHUNK_PATTERNS.get(site, "sign"),
            seed=4,
        )

    @property
    def job(self) -> JobKind:
        """What is struck; only one wire owes rounding errors."""
        wire = "int8" if self.promise.site in ("error memory", "anchor") else "fp32"
        return JobKind(strategy=self.strategy, ranks=RANKS, wire=wire)


ROWS = [
    Row(promise, strategy, extent)
    for promise in (*PROMISES, AUDITED)
    for strategy in STRATEGIES_OF[promise.strategies]
    if strategy in TRIED and (promise is not AUDITED or strategy in AUDITABLE)
    for extent in TRIED_EXTENTS[promise.extent]
]


@functools.cache
def clean(job: JobKind, *, is_guarded: bool = True) -> list[RankResult]:
    return run_virtual(Trial(task=WIDE, job=job, is_guarded=is_guarded, seed=0, updates=3))


def test_the_page_says_what_is_promised() -> None:
    page = [tuple(row.values()) for row in table(DOCS / "guards.md", "tests/faults/test_table.py")]
    assert page == [promise.cells for promise in (*PROMISES, AUDITED)]


def test_every_site_of_a_fault_that_our_exchanges_have_is_in_the_table() -> None:
    # An all-reduce of the backend's own is what no verified exchange uses.
    assert set(WORDS) == set(SITES) - {"all-reduced values"}
    pairs = {(name, row.site) for row in PROMISES for name in STRATEGIES_OF[row.strategies]}
    everywhere = {(name, site) for name in STRATEGIES_OF["all"] for site in WORDS}
    # Changes travel where the optimizer is sharded.
    assert pairs == everywhere - {(name, "anchor") for name in STRATEGIES_OF["replicated"]}


@pytest.mark.parametrize("name", TRIED)
def test_guards_change_nothing_and_say_nothing_where_nothing_is_wrong(name: str) -> None:
    job = JobKind(strategy=name, ranks=RANKS)
    for guarded, bare in zip(clean(job), clean(job, is_guarded=False), strict=True):
        assert (guarded.error, guarded.incidents) == (None, ())
        assert guarded.parameters == bare.parameters


@pytest.mark.long(keep=4)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_what_becomes_of_damage_is_what_the_table_says(row: Row) -> None:
    audit = Audit(rate=1.0) if row.promise is AUDITED else None
    trial = Trial(task=WIDE, job=row.job, is_guarded=True, audit=audit, seed=0, updates=3, fault=row.fault)
    results = run_virtual(trial)
    assert [application.changed for application in results[STRUCK].applications] == [True]
    ending = row.promise.endings[0] if row.promise.endings else "different"
    incidents = results[0].incidents
    named = {result.ranks or result.links for result in results} - {()}
    if ending == "error":
        assert None not in [result.error for result in results]
        if row.promise.named == "rank":
            assert named == {(STRUCK,)}
        else:
            assert named
            assert {link[1] for result in results for link in result.links} <= {STRUCK}
        return
    assert [result.error for result in results] == [None] * RANKS
    assert [result for result in results if result.incidents != incidents] == []
    # Starting values are sent again before there is anything to report to.
    silent = row.promise.seen_by is None or row.promise.named is None
    assert {incident.guard for incident in incidents} == (set() if silent else {row.promise.seen_by})
    if row.promise.named == "rank":
        assert {incident.ranks for incident in incidents} == {(STRUCK,)}
    if row.promise.named == "link":
        assert {incident.link[1] for incident in incidents} == {STRUCK}
    same = {
        result.parameters == healthy.parameters
        for result, healthy in zip(results, clean(row.job), strict=True)
    }
    assert same == {ending == "identical"}
