"""The table of a comparison."""

import random
from typing import Any

import pytest

from stretto_lab.observe import print_comparison
from stretto_lab.observe.tables import shares_of_limit


def run(strategy: str, repeat: int, rate: float | None, reached: float | None = None) -> dict[str, Any]:
    return {
        "strategy": strategy,
        "repeat": repeat,
        "samples_per_second": rate,
        "updates": 10,
        "heldout_loss": 2.0,
        "seconds_to_loss": reached,
        "seconds": 10.0,
        "exposed_seconds": None if strategy == "compute" else 1.0,
        "sent_bytes": 1_000_000,
    }


RUNS = [
    run("compute", 0, 100.0), run("acco", 0, 90.0, reached=4.0), run("compute", 1, 200.0), run("acco", 1, 120.0),
]  # fmt: skip


def test_without_the_limit_or_a_rate_there_is_no_share() -> None:
    assert shares_of_limit([RUNS[1]], [RUNS[1]]) == []
    assert shares_of_limit([run("acco", 0, None)], [*RUNS[:1], run("acco", 0, None)]) == []


def test_rows_have_medians_and_below_them_their_range(capsys: pytest.CaptureFixture[str]) -> None:
    print_comparison(RUNS)
    cells = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row for row in cells if row[:1] and row[0] in ("compute", "acco", "least", "greatest")] == [
        ["compute", "150", "100%", "10", "2.0000", "-", "-", "1.0"],
        ["least", "100"],
        ["greatest", "200"],
        ["acco", "105", "75%", "10", "2.0000", "4.0", "1/2", "10%", "1.0"],
        ["least", "90", "60%"],
        ["greatest", "120", "90%"],
    ]


def test_the_table_fits_80_columns_whatever_the_arms_and_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(0)
    for repeats in (1, 3):
        arms = ["compute", "acco:wire=int8:clock=2,32:lr=0.002:clip_norm=1.0", "torch-fsdp2", "zero1"]
        runs = [
            {
                **run(arm, repeat, 10 ** draw.uniform(0, 6), draw.uniform(1, 9999)),
                "updates": draw.randrange(1, 10**6),
                "sent_bytes": draw.randrange(10**10),
            }
            for arm in arms
            for repeat in range(repeats)
        ]
        print_comparison(runs)
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        assert "…" not in "".join(lines)


def test_a_column_without_numbers_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    print_comparison([run("acco", 0, 90.0)])
    shown = capsys.readouterr().out
    assert "compute" not in shown
    assert "target" not in shown
