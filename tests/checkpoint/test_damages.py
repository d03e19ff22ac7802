"""However a folder of checkpoints is damaged: none is loaded wrongly, and the next save succeeds."""

from pathlib import Path

from tests.checkpoint.damages import DAMAGES, Damaged

CASES = 12
"""Each kind twice; experiments/damaged_checkpoints.py draws hundreds."""


def test_random_damage_is_refused_in_a_line_or_survived(tmp_path: Path) -> None:
    damaged = Damaged(tmp_path)
    outcomes = [damaged.outcome(seed) for seed in range(CASES)]
    assert {outcome.partition(":")[0] for outcome in outcomes} == {damage.__name__ for damage in DAMAGES}
    assert any(outcome.endswith("1 refused") for outcome in outcomes)
