"""A small campaign from beginning to end, a guard that breaks its promise, and what is drawn."""

import dataclasses
from collections import Counter
from itertools import islice

import pytest

from experiments.campaign.drawing import DrawnFault, draw_faults
from experiments.campaign.judgement import Judgement, site_rows
from experiments.campaign.promises import AUDITABLE, EXTENTS, ROWS, STRATEGIES_OF
from experiments.campaign.run import campaign, main, strike
from experiments.campaign.trial import golden_runs
from stretto.guards import GUARDS, Guard
from stretto.guards.contract import GuardScript
from stretto_lab.recipes import TaskConfig
from tests.draws import part
from tests.train.tiny import Tiny

WIDE = Tiny(width=12_000, dropout=0.0)
"""Several buckets, and damage that is too large to be repaired, in milliseconds a job."""
NARROW = Tiny(width=64, dropout=0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Sleeper(Guard):
    """Stands in the place of a guard and notices nothing."""

    name = "rest"

    def after_update(self) -> GuardScript:
        yield from ()


def struck(task: TaskConfig, drawn: DrawnFault) -> Judgement:
    return strike((drawn, golden_runs(task, drawn.job, 0)))


@pytest.mark.long
def test_a_campaign_keeps_every_promise_and_its_faults_come_out_the_same_again() -> None:
    judgements, alarms = campaign(WIDE, 3, clean_rounds=3)
    assert alarms == []
    assert [one.violation for one in judgements] == [None] * 3
    rows = site_rows(judgements)
    assert sum(row["drawn"] for row in rows) == 3
    assert [row for row in rows if not (row["guard"] is None or row["detected"] == row["due"])] == []
    assert [struck(WIDE, drawn) for drawn in islice(draw_faults(0), 3)] == judgements


@pytest.mark.parametrize("site", part(["masters", "reduced gradient"]))
def test_a_guard_that_sleeps_has_broken_its_promise(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = next(
        one
        for one in draw_faults(0)
        if (one.fault.site, one.job.strategy, one.lasts) == (site, "zero1", False)
        and one.fault.extent in EXTENTS["element"]
    )
    assert struck(NARROW, drawn).violation is None
    monkeypatch.setitem(GUARDS, "rest", Sleeper)
    assert struck(NARROW, drawn).violation == "was not detected"


def test_one_fault_is_repeated_with_what_every_rank_saw(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = next(one for one in draw_faults(0) if one.fault.site == "broadcast values" and not one.lasts)
    assert main(["--only", str(drawn.number)]) == 0
    assert f"rank {drawn.rank}: " in capsys.readouterr().out


@pytest.mark.parametrize(("strategy", "site"), part([("wp", "gathered values"), ("zero1", "masters")]))
def test_what_is_found_behind_the_last_update_is_told(strategy: str, site: str) -> None:
    late = (one for one in draw_faults(0) if (one.fault.site, one.job.strategy) == (site, strategy))
    judgement = struck(NARROW, next(one for one in late if one.moment > 0.9 and not one.lasts))
    assert (judgement.is_applied, judgement.is_detected, judgement.violation) == (True, True, None)


def test_every_promise_is_tried_as_often_in_the_jobs_of_every_strategy() -> None:
    cells = [
        (row, name)
        for row in ROWS
        for name in STRATEGIES_OF[row.strategies]
        if row.audit_rate is None or name in AUDITABLE
    ]
    drawn = list(islice(draw_faults(5), 10 * len(cells)))
    assert Counter((one.row, one.job.strategy) for one in drawn) == dict.fromkeys(cells, 10)
    assert drawn == list(islice(draw_faults(5), len(drawn)))
    for one in drawn:
        assert one.fault.extent in EXTENTS[one.row.extent]
        assert 0 <= one.moment < 1
        assert 3 <= one.fault_within(3, 7).instant < 7
