"""The figures in `docs/figures` are those of the raw data."""

from pathlib import Path

import pytest

from benchmarks.figures import FIGURES, draw


@pytest.mark.long
def test_the_figures_are_drawn_from_the_data_of_today() -> None:
    draw(Path())
    drawn = {file.name: file.read_bytes() for file in Path().glob("*.svg")}
    committed = {file.name: file.read_bytes() for file in FIGURES.iterdir()}
    assert sorted(drawn) == sorted(committed)
    others = [name for name in drawn if drawn[name] != committed[name]]
    assert others == [], "python benchmarks/figures.py draws them again"
