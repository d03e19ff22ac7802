"""The claims of the papers: records are whole, verdicts follow from intervals by the rule, and runs are made once."""

import dataclasses
import itertools
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import claims
import pytest
from book import Book, difference, interval
from claims import Effect, Record, Site, Verdict, judge, record_of, worst

from stretto.errors import ConfigError
from tests.draws import seeds

PAPERS, RECORDS = claims.load()
EVERY = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)


def effect(**fields: Any) -> Effect:
    return Effect(says="above", of="of('other', 'loss') - of('first', 'loss')", digits=2, **fields)


def made_up(one: Effect, paper: tuple[float | None, float | None] = (None, None), **fields: Any) -> Record:
    """A record of two arms, of which the other one is said to end above the first."""
    rows = {
        row: {"words": f"--strategy {row}", "paper": number}
        for row, number in zip(("first", "other"), paper, strict=True)
    }
    given = {
        "claim": "c",
        "source": "s",
        "setting": "recipe",
        "rows": rows,
        "columns": {"loss": "loss"},
        **fields,
    }
    return dataclasses.replace(record_of("acco.made-up", given), effects=(one,))


def add(book: Book, words: str, seed: int, loss: float | None) -> None:
    book.add({"words": words, "seed": seed, "heldout_loss": loss, "error": None, "cpu_seconds": 1.0})


def site_of(first: list[float], other: list[float | None], seeds: int) -> Site:
    """Runs of both arms, by seed."""
    book = Book(Path())
    for arm, losses in (("first", first), ("other", other)):
        for seed, loss in enumerate(losses):
            add(book, f"recipe --strategy {arm}", seed, loss)
    return Site(book, seeds)


@EVERY
def test_a_record_says_what_and_where_and_how(record: Record) -> None:
    assert record.paper in PAPERS
    assert record.claim
    assert record.source, "every number of a paper has a source"
    assert record.kind in ("paper", "answer", "question")
    if not record.effects:
        assert record.needs, "a claim without runs says what would decide it"
        assert not record.cells
        return
    assert record.scale
    assert record.differences
    for one in record.effects:
        assert one.limit, f"{one.says}: a limit is ours, so it has a reason"
        assert math.isfinite(one.least) or math.isfinite(one.most), (
            f"{one.says}: without a limit it cannot fail"
        )


def test_every_paper_has_records_that_can_be_checked_and_some_that_cannot() -> None:
    for key in PAPERS:
        assert {not record.effects for record in RECORDS.values() if record.paper == key} == {True, False}


def test_every_run_of_every_record_is_a_command_that_can_be_typed() -> None:
    book = Book(Path())
    sites = [Site(book), Site(book, data="folder", also="--updates 3 --samples None")]
    words = {
        site.words(record, cell)
        for record in RECORDS.values()
        for site in (sites if record.real else sites[:1])
        for cell in record.every_cell()
    }
    assert len(words) > 150
    settings = [record.real for record in RECORDS.values() if not record.effects and record.real]
    for one in (*words, *(real.format(data="folder", here=claims.HERE) for real in settings)):
        claims.configure(one, seed=3)


@pytest.mark.parametrize(
    ("low", "high", "limits", "verdict"),
    [
        (1, 2, effect(least=0), Verdict.HOLDS),
        (-2, -1, effect(least=0), Verdict.FAILS),
        (-1, 1, effect(least=0), Verdict.UNCHECKED),
        (1, 2, effect(least=0, paper=1.5), Verdict.HOLDS),
        (1, 2, effect(least=0, paper=3), Verdict.IN_SHAPE),
        (3, 4, effect(most=2), Verdict.FAILS),
        (-0.5, 0.5, effect(least=-1, most=1), Verdict.HOLDS),
        (0.5, 1.5, effect(least=-1, most=1), Verdict.UNCHECKED),
        (2, 2, effect(least=2, most=2), Verdict.HOLDS),
    ],
)
def test_the_rule(low: float, high: float, limits: Effect, verdict: Verdict) -> None:
    assert judge({"mean": (low + high) / 2, "low": low, "high": high}, limits) is verdict


def test_one_seed_and_no_seed_decide_nothing() -> None:
    assert judge({"mean": 5.0}, effect(least=0)) is Verdict.UNCHECKED
    assert judge(None, effect(least=0)) is Verdict.UNCHECKED


@pytest.mark.parametrize(
    ("number", "verdict"),
    [(31.4, Verdict.HOLDS), (31.44, Verdict.HOLDS), (31.9, Verdict.IN_SHAPE), (34.0, Verdict.FAILS)],
)
def test_a_computed_number_decides_without_an_interval_and_meets_the_papers_if_it_rounds_to_it(
    number: float, verdict: Verdict
) -> None:
    computed = dataclasses.replace(
        made_up(Effect("GB", "of('other', 'loss')", most=33, digits=1), paper=(None, 31.4)), computed=True
    )
    (one,) = site_of([1.0, 1.0], [number, number], 2).found(computed).effects
    assert one.interval == {"mean": number}
    assert one.verdict is verdict


@pytest.mark.parametrize("seed", seeds(50))
def test_a_verdict_is_the_same_from_the_other_side_and_a_narrower_interval_never_changes_sides(
    seed: int,
) -> None:
    draw = random.Random(seed)
    low, inner, outer, high = sorted(draw.gauss(0, 1) for _ in range(4))
    least, most = sorted(draw.gauss(0, 1) for _ in range(2))
    paper = draw.choice([None, draw.gauss(0, 1)])
    wide = judge({"mean": 0, "low": low, "high": high}, effect(least=least, most=most, paper=paper))
    mirrored = effect(least=-most, most=-least, paper=None if paper is None else -paper)
    assert judge({"mean": 0, "low": -high, "high": -low}, mirrored) is wide
    of_words = judge({"mean": 0, "low": low, "high": high}, effect(least=least))
    narrow = judge({"mean": 0, "low": inner, "high": outer}, effect(least=least))
    assert of_words in (narrow, Verdict.UNCHECKED)


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
def test_runs_of_a_record_decide_in_pairs(other: list[float | None], verdict: Verdict) -> None:
    assert site_of([1.0, 1.1, 1.2], other, 3).found(made_up(effect(least=0))).verdict is verdict


def test_the_papers_number_of_an_effect_is_computed_as_ours_from_its_table() -> None:
    site = site_of([1.0, 1.0], [2.05, 2.15], 2)
    (met,) = site.found(made_up(effect(least=0), paper=(3.0, 4.1))).effects
    assert met.effect.paper == pytest.approx(1.1)
    assert met.verdict is Verdict.HOLDS
    (missed,) = site.found(made_up(effect(least=0), paper=(3.0, 9.0))).effects
    assert missed.verdict is Verdict.IN_SHAPE


def test_intervals_are_those_of_student() -> None:
    # t(0.975, 2 degrees of freedom) = 4.30265; the standard error is 1 / sqrt(3).
    assert interval([1.0, 2.0, 3.0]) == {
        "mean": 2.0,
        "low": pytest.approx(-0.48414, abs=1e-5),
        "high": pytest.approx(4.48414, abs=1e-5),
    }
    assert interval([1.0]) == {"mean": 1.0}
    assert difference([3.0, 4.0], [1.0, 2.0]) == {"mean": 2.0, "low": 2.0, "high": 2.0}


def test_runs_that_are_in_the_book_are_not_wanted_again() -> None:
    record = made_up(effect(least=0))
    site = site_of([1.0, 1.0], [2.0], 3)
    first, other = "recipe --strategy first", "recipe --strategy other"
    assert site.missing([record]) == [(first, 2), (other, 1), (other, 2)]
    assert Site(Book(Path()), 1).missing([record]) == []


def test_a_replication_has_seeds_of_its_own_and_none_that_chose_a_rate() -> None:
    record = made_up(effect(least=0))
    again = Site(Book(Path()), 2, first_seed=200)
    assert [seed for _, seed in again.missing([record])] == [200, 201] * 2
    add(again.book, "recipe --strategy first", 0, 1.0)
    assert not again.found(record).cells["first"]["loss"].values
    with pytest.raises(ConfigError, match=r"seeds \[100\] choose learning rates"):
        Site(Book(Path()), 2, first_seed=99).missing([record])


def test_a_run_without_the_number_leaves_its_record_undecided() -> None:
    one = site_of([1.0, 1.0], [2.0, None], 2).found(made_up(effect(least=0)))
    assert one.verdict is Verdict.UNCHECKED
    assert "do not have the number" in one.why


def test_a_rate_is_chosen_on_seeds_that_serve_for_nothing_else() -> None:
    tuned = made_up(effect(least=0), rates=[0.1, 0.2])
    book = Book(Path())
    arms = {arm: f"recipe --strategy {arm} --task.lr " for arm in ("first", "other")}
    tuning = [
        (f"{words}{rate}", seed)
        for words in arms.values()
        for rate in (0.1, 0.2)
        for seed in claims.TUNING_SEEDS
    ]
    assert Site(book, 1).missing([tuned]) == tuning
    for words, seed in tuning:
        add(book, words, seed, 1.0 if "0.2" in words else 1.5)
    assert Site(book, 1).missing([tuned]) == [(f"{words}0.2", 0) for words in arms.values()]
    for seed in range(2):
        add(book, f"{arms['first']}0.2", seed, 1.0)
        add(book, f"{arms['other']}0.2", seed, 2.0)
    one = Site(book, 2).found(tuned)
    assert (one.verdict, one.cpu_seconds) == (Verdict.HOLDS, 8 + 4)


LINE = {
    "curve": [
        {"step": 0, "fresh": 0, "heldout_loss": 2.0},
        {"step": 10, "fresh": 4, "heldout_loss": 1.0},
        {"step": 20, "fresh": 8, "heldout_loss": 0.5},
    ]
}


@pytest.mark.parametrize(("target", "fresh"), [(1.5, 2.0), (1.0, 4.0), (0.75, 6.0), (2.5, 0.0), (0.4, None)])
def test_a_loss_is_reached_where_the_line_between_evaluations_crosses_it(
    target: float, fresh: float | None
) -> None:
    assert claims.loads_to(target).of(LINE) == fresh


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["claims.py", *words])
    claims.main()


def test_a_record_is_run_judged_and_resumed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = "acco.convolutions"
    words = [record, "--seeds", "1", "--also=--updates 3", "--out", "."]
    run(monkeypatch, *words)
    assert f"{record} cannot be checked: one seed has no interval" in capsys.readouterr().out
    file = Path("runs.jsonl")
    whole = file.read_text().splitlines()
    assert len(whole) == 2

    # As a process leaves it that is killed while it writes.
    file.write_text(whole[0] + "\n" + whole[1][:30])
    run(monkeypatch, *words)
    assert "1 runs to make" in capsys.readouterr().out
    again = file.read_text().splitlines()
    made = [
        {key: value for key, value in json.loads(line).items() if key != "cpu_seconds"}
        for line in (*whole, *again)
    ]
    assert made[:2] == made[2:]

    run(monkeypatch, *words)
    assert "to make" not in capsys.readouterr().out


@pytest.mark.long
def test_the_same_command_takes_the_papers_data(monkeypatch: pytest.MonkeyPatch) -> None:
    data, draw = Path("cifar-10-batches-bin"), random.Random(0)
    data.mkdir()
    for name in (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"):
        pictures = [bytes([draw.randrange(10)]) + draw.randbytes(3072) for _ in range(64)]
        (data / name).write_bytes(b"".join(pictures))
    few = "--updates 3 --samples None --task.width 0.1 --task.readers 0"
    words = ["paft.large-bursts", "--data", str(data), "--also", few, "--seeds", "1"]
    run(monkeypatch, *words, "--out", "out")
    made = Book(Path("out")).runs
    assert len(made) == 4
    assert [one for one in made if not (one["error"] is None and one["updates"] == 3)] == []
