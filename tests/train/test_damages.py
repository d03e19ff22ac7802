"""However the folder of a run is damaged: the resumed run ends with the same bits, or is refused in one line."""

from pathlib import Path

import pytest

from tests.train.damages import DAMAGES, DamagedRuns

CASES = 3 * len(DAMAGES)
"""Each kind of damage three times; experiments/damaged_checkpoints.py draws hundreds."""


@pytest.mark.long
def test_a_damaged_run_ends_with_the_same_bits_or_is_refused_in_one_line(tmp_path: Path) -> None:
    runs = DamagedRuns(tmp_path)
    outcomes = [runs.outcome(seed) for seed in range(CASES)]
    assert {outcome.partition(":")[0] for outcome in outcomes} == {damage.__name__ for damage in DAMAGES}
    assert sum(outcome.endswith("ended") for outcome in outcomes) > CASES / 4
    assert any("refused" in outcome for outcome in outcomes)
