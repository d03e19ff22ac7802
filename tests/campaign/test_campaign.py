"""A small campaign from beginning to end, and a guard that does not keep its promise."""

import dataclasses
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from stretto.guards import GUARDS, Guard
from stretto.guards.contract import GuardScript
from stretto_lab.campaign import RESULTS, CampaignConfig, repeat_fault, small
from stretto_lab.campaign.drawing import draw_faults
from stretto_lab.campaign.judgement import site_rows
from stretto_lab.cli import main
from stretto_lab.cli.commands import _complain
from stretto_lab.recipes import RECIPES, StdlibGPT
from tests.terminal import print_on_a_terminal
from tests.train.tiny import Tiny

FAULTS = 3
WIDE = Tiny(width=12_000, dropout=0.0)
"""Several buckets, and damage that is too large to be repaired, in milliseconds a job. Without dropout, for which
virtual ranks draw other numbers than real ones."""

NARROW = Tiny(width=64, dropout=0.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Sleeper(Guard):
    """Stands in the place of a guard and notices nothing."""

    name = "rest"

    def after_update(self) -> GuardScript:
        yield from ()


def what_became(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "overhead": None, "applied_on_real_workers": None} for row in rows]


def test_a_campaign_is_reported_row_by_row_and_its_faults_come_out_the_same_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECIPES, "wide", lambda: WIDE)
    print_on_a_terminal(monkeypatch)
    options = "--real 1 --clean-rounds 3 --workers 1 --out found"
    assert main(["campaign", "wide", "--faults", str(FAULTS), *options.split()]) == 0
    shown = capsys.readouterr().out
    report = json.loads(Path("found", RESULTS).read_text())
    assert report["faults"] == FAULTS
    assert report["on_real_workers"] == 1
    assert report["false_alarms"] == 0
    assert report["clean_rounds"] >= 3
    assert report["broken"] == []
    assert sum(row["applied"] for row in report["sites"]) == report["applied"]
    assert sum(row["drawn"] for row in report["patterns"]) == FAULTS
    assert all(row["due"] == row["detected"] for row in report["patterns"])
    assert len(report["not_applied"]) == FAULTS - report["applied"]
    for row in report["sites"]:
        assert row["overhead"] > 0
        if row["guard"] is not None:
            assert row["detected"] == row["due"]
        assert row["site"] in shown
    assert f"{report['applied']} of {FAULTS} faults changed bits" in shown
    assert max(map(len, shown.splitlines())) <= 80
    again = CampaignConfig(task=WIDE, real=0)
    judgements = [repeat_fault(again, number) for number in range(FAULTS)]
    assert what_became(site_rows(judgements, report["overheads"])) == what_became(report["sites"])


def number_of(site: str) -> int:
    """Return the number of a fault that strikes a few elements once, in a job of ZeRO-1."""
    extents = ("element", "run")
    of_site = (
        one for one in islice(draw_faults(0), 2000) if (one.fault.site, one.job.strategy) == (site, "zero1")
    )
    return next(one.number for one in of_site if one.fault.extent in extents and not one.lasts)


@pytest.mark.parametrize("site", ["masters", "reduced gradient"])
def test_a_guard_that_sleeps_has_broken_its_promise(
    site: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    number = number_of(site)
    monkeypatch.setitem(RECIPES, "narrow", lambda: NARROW)
    words = ["campaign", "narrow", "--faults", "2000", "--real", "0", "--only", str(number)]
    assert main(words) == 0
    assert "mended" in capsys.readouterr().out
    monkeypatch.setitem(GUARDS, "rest", Sleeper)
    assert main(words) == 1
    assert "was not detected" in capsys.readouterr().out


def test_a_broken_promise_is_printed_with_the_line_that_repeats_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = {
        "alarms": [],
        "broken": [{"number": 17, "why": "", "story": "ended as different; was not detected"}],
    }
    assert _complain(report, ["stdlib-gpt", "--faults", "60", "--out", "a folder"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "broken promise: ended as different; was not detected",
        "replay: stretto campaign stdlib-gpt --faults 60 --out 'a folder' --only 17",
    ]


def test_a_false_alarm_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert _complain({"alarms": ["zero1, seed 3: update 2: masters damaged"], "broken": []}, []) == 1
    assert capsys.readouterr().out == "false alarm: zero1, seed 3: update 2: masters damaged\n"


def test_starting_values_that_were_damaged_on_the_rank_that_sends_them_are_what_they_were() -> None:
    campaign = CampaignConfig(task=small(StdlibGPT()), real=0)
    drawn = next(
        one
        for one in draw_faults(0)
        if one.fault.site == "broadcast values" and one.fault.rank == 0 and not one.lasts
    )
    judgement = repeat_fault(campaign, drawn.number)
    assert judgement.is_applied
    assert (judgement.ending, judgement.violation) == ("identical", None)


@pytest.mark.parametrize(("strategy", "site"), [("wp", "gathered values"), ("zero1", "masters")])
def test_what_is_found_behind_the_last_update_is_told(strategy: str, site: str) -> None:
    campaign = CampaignConfig(task=NARROW, real=0)
    late = (one for one in draw_faults(0) if (one.fault.site, one.job.strategy) == (site, strategy))
    drawn = next(one for one in late if one.moment > 0.9 and not one.lasts)
    judgement = repeat_fault(campaign, drawn.number)
    assert judgement.is_applied
    assert judgement.is_detected
    assert judgement.violation is None
