"""What is made, and what is read from runs that were made."""

import dataclasses
from pathlib import Path

import pytest

from stretto.errors import ConfigError
from stretto_lab.reproduce import Book, Limits, Site, Trial, Verdict, found
from stretto_lab.reproduce.measures import loads_to, loss_at
from stretto_lab.reproduce.results import TUNING_SEEDS, missing
from tests.reproduce.made_up import SITE, add, at_rate, book_of, record

LIMITS = Limits(least=0)


def test_runs_that_are_in_the_book_are_not_wanted_again(tmp_path: Path) -> None:
    book = book_of(tmp_path, [1.0, 1.0], [2.0])
    assert missing(record(LIMITS), book, 3, SITE) == [
        Trial("recipe --strategy first", 2),
        Trial("recipe --strategy other", 1),
        Trial("recipe --strategy other", 2),
    ]
    assert missing(record(LIMITS), Book(tmp_path), 1, SITE) == []


def test_a_run_without_the_number_leaves_its_record_undecided(tmp_path: Path) -> None:
    one = found(record(LIMITS), book_of(tmp_path, [1.0, 1.0], [2.0, None]), 2, SITE)
    assert one.verdict is Verdict.UNCHECKED
    assert "do not have the number" in one.why


def test_a_rate_is_chosen_on_seeds_that_serve_for_nothing_else(tmp_path: Path) -> None:
    tuned = record(LIMITS)
    cell = dataclasses.replace(tuned.cells["first"]["loss"], rates=(0.1, 0.2))
    tuned = dataclasses.replace(tuned, cells={"first": {"loss": cell}, "other": tuned.cells["other"]})
    book = Book(tmp_path)
    words = "recipe --strategy first"
    tuning = [Trial(at_rate(words, rate), seed) for rate in (0.1, 0.2) for seed in TUNING_SEEDS]
    assert missing(tuned, book, 1, SITE) == [*tuning, Trial("recipe --strategy other", 0)]
    for trial in tuning:
        add(book, trial.words, trial.seed, 1.0 if "0.2" in trial.words else 1.5)
    assert missing(tuned, book, 1, SITE) == [
        Trial(at_rate(words, 0.2), 0),
        Trial("recipe --strategy other", 0),
    ]
    for seed in range(2):
        add(book, at_rate(words, 0.2), seed, 1.0)
        add(book, "recipe --strategy other", seed, 2.0)
    assert found(tuned, book, 2, SITE).verdict is Verdict.HOLDS
    assert found(tuned, book, 2, SITE).cpu_seconds == 4 + 2 + 2


def test_with_data_the_papers_model_is_trained_at_its_own_rate() -> None:
    cell = dataclasses.replace(record(LIMITS).cells["first"]["loss"], rates=(0.1, 0.2))
    real = record(LIMITS, real="images --preset big --task.data {data}")
    site = Site(data="my pictures", scale=0.5)
    words = "images --preset big --task.data 'my pictures' --device auto --scale 0.5 --strategy first"
    assert site.words(real, cell) == words
    assert site.rates(cell) == ()
    with pytest.raises(ConfigError, match="takes no data"):
        site.words(record(LIMITS), cell)


LINE = {
    "curve": [
        {"step": 0, "fresh": 0, "samples": 0, "heldout_loss": 2.0},
        {"step": 10, "fresh": 4, "samples": 80, "heldout_loss": 1.0},
        {"step": 20, "fresh": 8, "samples": 160, "heldout_loss": 0.5},
    ]
}


@pytest.mark.parametrize(("target", "fresh"), [(1.5, 2.0), (1.0, 4.0), (0.75, 6.0), (2.5, 0.0), (0.4, None)])
def test_a_loss_is_reached_where_the_line_between_evaluations_crosses_it(
    target: float, fresh: float | None
) -> None:
    assert loads_to(target).of(LINE) == fresh


@pytest.mark.parametrize(("samples", "loss"), [(0, 2.0), (40, 1.5), (80, 1.0), (120, 0.75), (200, None)])
def test_a_loss_after_so_many_samples_lies_on_the_same_lines(samples: float, loss: float | None) -> None:
    assert loss_at("samples", samples).of(LINE) == loss
