"""Records are whole: every number has a source, every run can be read, and every effect has its cells."""

import math
import shlex
from pathlib import Path

import pytest

from stretto_lab.cli.reproduction import configure
from stretto_lab.reproduce import PAPERS, RECORDS, Book, Record, Site, found
from stretto_lab.reproduce.results import cells

EVERY = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)


def test_every_paper_has_records_that_can_be_checked_and_some_that_cannot() -> None:
    assert len(RECORDS) > 25
    for key in PAPERS:
        own = [record for record in RECORDS.values() if record.paper == key]
        assert {bool(record.unchecked) for record in own} == {True, False}
    assert all(record.paper in PAPERS for record in RECORDS.values())


@EVERY
def test_a_record_says_what_and_where_and_how(record: Record) -> None:
    assert record.claim
    assert record.source, "every number of a paper has a source"
    if record.unchecked:
        assert record.told
        assert not record.cells
    else:
        assert record.effects
        assert record.scale
        assert record.differences


def test_every_run_of_every_record_is_a_command_that_can_be_typed() -> None:
    commands = {
        site.words(record, cell)
        for record in RECORDS.values()
        for site in (Site(), *([Site(data="folder", scale=0.5)] if record.real else []))
        for _, _, cell in cells(record)
        if cell.words is not None
    }
    for words in commands:
        configure([*shlex.split(words), "--seed", "3"])


@EVERY
def test_effects_read_cells_that_the_record_has(record: Record) -> None:
    rows = list(record.cells)

    def reading(row: str, column: str) -> float:
        assert column in record.cells[row]
        return 1.0 + rows.index(row)

    for effect in record.effects:
        assert not math.isnan(effect.of(reading))


def test_without_runs_nothing_is_said(tmp_path: Path) -> None:
    book = Book(tmp_path)
    for record in RECORDS.values():
        one = found(record, book, record.seeds, Site())
        has_runs = any(cell.words is not None for _, _, cell in cells(record))
        assert one.why or not has_runs
