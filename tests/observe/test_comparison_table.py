"""The table of a comparison."""

from typing import Any

import pytest

from stretto.observe import print_comparison
from stretto.observe.tables import shares_of_limit


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
    run("compute", 0, 100.0),
    run("acco", 0, 90.0, reached=4.0),
    run("compute", 1, 200.0),
    run("acco", 1, 120.0),
]


def test_a_share_compares_runs_of_the_same_repeat() -> None:
    assert shares_of_limit([RUNS[1], RUNS[3]], RUNS) == [0.9, 0.6]


def test_without_the_limit_or_a_rate_there_is_no_share() -> None:
    assert shares_of_limit([RUNS[1]], [RUNS[1]]) == []
    assert shares_of_limit([run("acco", 0, None)], [*RUNS[:1], run("acco", 0, None)]) == []


def test_rows_have_medians_with_their_spread(capsys: pytest.CaptureFixture[str]) -> None:
    print_comparison(RUNS)
    shown = capsys.readouterr().out
    compute, acco = (line for line in shown.splitlines() if "MB" in line)
    for part in ("compute", "150 (100 to 200)", "100%", "-"):
        assert part in compute
    for part in ("acco", "105 (90 to 120)", "75% (60% to 90%)", "4.0 s, 1 of 2", "10%", "1.0 MB"):
        assert part in acco
