"""Faults as text: what is written is read again, and what cannot be is named."""

import pytest

from stretto.errors import ConfigError, UnknownName
from stretto_lab.faults import SITES, Fault, FaultPlan, parse_faults

STICKY = Fault(site="optimizer state", rank=1, instant=3, lasts="sticky", rate=0.5)


def test_a_fault_is_its_site_its_rank_and_what_is_set() -> None:
    assert parse_faults("optimizer-state:rank=1:instant=3:lasts=sticky:rate=0.5") == (STICKY,)
    assert parse_faults("masters:rank=0, sum:rank=2") == (
        Fault(site="masters", rank=0),
        Fault(site="sum", rank=2),
    )
    assert parse_faults("none") == ()


def test_every_site_has_a_word() -> None:
    for site in SITES:
        expected = (Fault(site=site, rank=4, pattern="nan"),)
        assert parse_faults(f"{site.replace(' ', '-')}:rank=4:pattern=nan") == expected


@pytest.mark.parametrize(
    ("text", "kind", "named"),
    [
        ("moon:rank=1", UnknownName, "no site of a fault is called 'moon'"),
        ("masters:rank=1:size=3", UnknownName, "no setting 'size'"),
        ("masters", ConfigError, "masters:rank=1"),
        ("masters:rank=one", ConfigError, "cannot read rank='one'"),
        ("masters:rank=1:lasts=long", ConfigError, "expected one of once, sticky, bursts"),
    ],
)
def test_what_cannot_be_is_named(text: str, kind: type[ConfigError], named: str) -> None:
    with pytest.raises(kind, match=named):
        parse_faults(text)


def test_a_run_that_goes_on_takes_what_lasts_by_the_new_numbers() -> None:
    once, first, last = (
        Fault(site="sum", rank=3),
        Fault(site="sum", rank=0, lasts="sticky"),
        Fault(site="sum", rank=3, lasts="bursts"),
    )
    plan = FaultPlan((once, STICKY, first, last))
    assert plan.going_on([1]) == FaultPlan((first, Fault(site="sum", rank=2, lasts="bursts")))
