"""Verdicts follow from intervals by the rule, both ways."""

import itertools
import random
from pathlib import Path

import pytest
from scipy import stats

from stretto_lab.reproduce import Interval, Limits, Verdict, difference, found, interval, judge
from stretto_lab.reproduce.intervals import student
from stretto_lab.reproduce.verdict import worst
from tests.reproduce.made_up import SITE, book_of, record


def around(low: float, high: float) -> Interval:
    return {"mean": (low + high) / 2, "low": low, "high": high}


@pytest.mark.parametrize(
    ("low", "high", "limits", "verdict"),
    [
        (1, 2, Limits(least=0), Verdict.HOLDS),
        (-2, -1, Limits(least=0), Verdict.FAILS),
        (-1, 1, Limits(least=0), Verdict.UNCHECKED),
        (1, 2, Limits(least=0, paper=1.5), Verdict.HOLDS),
        (1, 2, Limits(least=0, paper=3), Verdict.IN_SHAPE),
        (3, 4, Limits(most=2), Verdict.FAILS),
        (-0.5, 0.5, Limits(least=-1, most=1), Verdict.HOLDS),
        (0.5, 1.5, Limits(least=-1, most=1), Verdict.UNCHECKED),
        (86, 90, Limits(least=0, paper=87, is_best=True), Verdict.IN_SHAPE),
        (88, 90, Limits(least=0, paper=87, is_best=True), Verdict.HOLDS),
        (2, 2, Limits(least=2, most=2), Verdict.HOLDS),
    ],
)
def test_the_rule(low: float, high: float, limits: Limits, verdict: Verdict) -> None:
    assert judge(around(low, high), limits) is verdict


def test_one_seed_and_no_seed_decide_nothing() -> None:
    assert judge({"mean": 5.0}, Limits(least=0)) is Verdict.UNCHECKED
    assert judge(None, Limits(least=0)) is Verdict.UNCHECKED


@pytest.mark.parametrize("seed", range(50))
def test_a_verdict_is_the_same_from_the_other_side(seed: int) -> None:
    draw = random.Random(seed)
    low, high = sorted(draw.gauss(0, 1) for _ in range(2))
    least, most = sorted(draw.gauss(0, 1) for _ in range(2))
    paper = draw.choice([None, draw.gauss(0, 1)])
    mirrored = Limits(least=-most, most=-least, paper=None if paper is None else -paper)
    assert judge(around(low, high), Limits(least=least, most=most, paper=paper)) is judge(
        around(-high, -low), mirrored
    )


@pytest.mark.parametrize("seed", range(50))
def test_a_narrower_interval_never_changes_sides(seed: int) -> None:
    draw = random.Random(seed)
    low, inner, outer, high = sorted(draw.gauss(0, 1) for _ in range(4))
    limits = Limits(least=draw.gauss(0, 1))
    wide, narrow = judge(around(low, high), limits), judge(around(inner, outer), limits)
    assert wide in (narrow, Verdict.UNCHECKED)


def test_a_record_has_the_verdict_that_speaks_most_against_it() -> None:
    order = [Verdict.HOLDS, Verdict.IN_SHAPE, Verdict.UNCHECKED, Verdict.FAILS]
    for one, other in itertools.product(order, order):
        assert worst([one, other]) is max(one, other, key=order.index)
    assert worst([]) is Verdict.UNCHECKED


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        ([2.0, 2.1, 2.2], Verdict.HOLDS),
        ([0.5, 0.6, 0.4], Verdict.FAILS),
        ([0.5, 1.0, 2.0], Verdict.UNCHECKED),
    ],
)
def test_runs_of_a_record_decide_in_pairs(
    tmp_path: Path, other: list[float | None], verdict: Verdict
) -> None:
    book = book_of(tmp_path, [1.0, 1.1, 1.2], other)
    assert found(record(Limits(least=0)), book, 3, SITE).verdict is verdict


def test_the_papers_number_of_an_effect_is_computed_as_ours_from_its_table(tmp_path: Path) -> None:
    book = book_of(tmp_path, [1.0, 1.0], [2.05, 2.15])
    (met,) = found(record(Limits(least=0), paper=(3.0, 4.1)), book, 2, SITE).effects
    assert met.paper == pytest.approx(1.1)
    assert met.verdict is Verdict.HOLDS
    (missed,) = found(record(Limits(least=0), paper=(3.0, 9.0)), book, 2, SITE).effects
    assert missed.verdict is Verdict.IN_SHAPE


def test_intervals_are_those_of_student() -> None:
    for freedom in range(1, 40):
        assert student(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=1e-9)
    # t(0.975, 2 degrees of freedom) = 4.30265; the standard error is 1 / sqrt(3).
    assert interval([1.0, 2.0, 3.0]) == {
        "mean": 2.0,
        "low": pytest.approx(-0.48414, abs=1e-5),
        "high": pytest.approx(4.48414, abs=1e-5),
    }
    assert interval([1.0]) == {"mean": 1.0}
    assert difference([3.0, 4.0], [1.0, 2.0]) == {"mean": 2.0, "low": 2.0, "high": 2.0}
