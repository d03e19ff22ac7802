"""Records in a file that a resumed run continues consistently."""

import json
import math
import random
import re
from pathlib import Path

import pytest

from stretto.errors import ConfigError
from stretto.recorder import RunFiles
from stretto_lab.faults import Application, Fault
from stretto_lab.observe import JsonLines, StrikeRecorder, read_json_lines, replace_json
from tests.draws import seeds
from tests.observe.updates import update

FILE = Path("records.jsonl")


def write(steps: range, keep_until: int | None) -> None:
    lines = JsonLines(FILE, keep_until)
    for step in steps:
        lines.write({"step": step})
    lines.close()


def steps() -> list[int]:
    return [record["step"] for record in read_json_lines(FILE)]


@pytest.mark.parametrize("seed", seeds(24))
def test_a_file_holds_at_once_what_was_written_up_to_each_resume_and_after_it(seed: int) -> None:
    """A record that was being written at the end is none; a new run begins the file."""
    draw, expected = random.Random(seed), list[int]()
    for _ in range(draw.randint(2, 5)):
        keep_until = draw.choice([None, *range(12)])
        expected = [] if keep_until is None else [step for step in expected if step <= keep_until]
        lines = JsonLines(FILE, keep_until)
        for step in range((keep_until or 0) + 1, (keep_until or 0) + draw.randint(1, 6)):
            lines.write({"step": step})
            expected.append(step)
            assert steps() == expected
        lines.close()
        if draw.random() < 0.5:
            with FILE.open("ab") as file:
                file.write(b'{"step": 4, "lo')
        assert steps() == expected


def test_a_damaged_line_is_an_error_that_names_it() -> None:
    FILE.write_bytes(b'{"step": 1}\n{"st{"step": 3}\n{"step": 4}\n')
    with pytest.raises(ConfigError, match=r"records\.jsonl, line 2: expected one JSON object, found"):
        read_json_lines(FILE)
    with pytest.raises(ConfigError, match="line 2"):
        JsonLines(FILE, keep_until=4)
    write(range(2, 4), keep_until=0)  # nothing behind the checkpoint is looked at
    assert steps() == [2, 3]


def test_a_recorder_writes_updates_with_all_their_fields_and_evaluations_beside_them() -> None:
    recorder = RunFiles(Path(), None, lambda: 7)
    recorder.updated(update(1, loss=math.nan), training_seconds=1.5)
    recorder.evaluated(1, 2.5, training_seconds=1.5)
    recorder.close()
    (record,) = read_json_lines(Path("updates.jsonl"))
    assert record == {
        **update(1).as_json(),
        "micro_batches": [[4, 2]],
        "rounds": [[[4, 2]]],
        "learning_rates": [0.1, 0.2],
        "uses": [],
        "loss": None,
        "training_seconds": 1.5,
    }
    assert read_json_lines(Path("evaluations.jsonl")) == [
        {"step": 1, "heldout_loss": 2.5, "training_seconds": 1.5}
    ]


def test_memory_has_a_line_for_every_rise() -> None:
    peaks = iter([7, 7, 9, 9, 10])
    recorder = RunFiles(Path(), None, lambda: next(peaks))
    for step in range(1, 6):
        recorder.updated(update(step), training_seconds=0.0)
    recorder.close()
    assert read_json_lines(Path("memory.jsonl")) == [
        {"step": 1, "peak_bytes": 7},
        {"step": 3, "peak_bytes": 9},
        {"step": 5, "peak_bytes": 10},
    ]


def test_numbers_that_are_not_finite_are_written_as_json_and_read_again() -> None:
    recorder = RunFiles(Path(), None, lambda: 7)
    recorder.updated(update(1, loss=math.nan, gradient_norm=math.inf), training_seconds=1.0)
    for step, loss in enumerate((math.nan, math.inf, -math.inf, 2.5)):
        recorder.evaluated(step, loss, training_seconds=float(step))
    recorder.close()
    replace_json(Path("compare.json"), {"runs": [{"loss": math.nan, "evaluations": ({"loss": math.inf},)}]})
    lines = "".join(Path(name).read_text() for name in ("evaluations.jsonl", "updates.jsonl", "compare.json"))
    assert not {"NaN", "Infinity"} & set(re.findall(r"\w+", lines))  # Python's words, not JSON's
    RunFiles(Path(), 2, lambda: 7).close()
    assert [one["heldout_loss"] for one in read_json_lines(Path("evaluations.jsonl"))] == [None] * 3
    compared = json.loads(Path("compare.json").read_text())
    assert compared == {"runs": [{"loss": None, "evaluations": [{"loss": None}]}]}


def test_a_fault_has_a_line_for_every_update_in_which_it_changed_values() -> None:
    once = Fault(site="masters", rank=1)
    often = Fault(site="sum", rank=1, lasts="sticky", pattern="zero")
    strikes: list[Application] = []

    def strike(fault: Fault, step: int, elements: int, after: str = "b") -> None:
        strikes.append(
            Application(
                fault=fault, opportunity=0, step=step, elements=elements, span=(0.0, 1.0), before="a", after=after
            )
        )  # fmt: skip

    recorder = StrikeRecorder(FILE, None, strikes)
    strike(often, 2, 10)
    strike(once, 2, 1)
    strike(often, 2, 20)
    strike(often, 2, 40, after="a")  # zeros that are zeroed
    recorder.updated(update(3), training_seconds=0.0)
    recorder.updated(update(4), training_seconds=0.0)
    strike(often, 4, 30)
    recorder.close()
    zeroed = {"rank": 1, "site": "sum", "pattern": "zero"}
    assert read_json_lines(FILE) == [
        {"step": 3, **zeroed, "strikes": 2, "elements": 30},
        {"step": 3, "rank": 1, "site": "masters", "pattern": "flip", "strikes": 1, "elements": 1},
        {"step": 5, **zeroed, "strikes": 1, "elements": 30},
    ]
    StrikeRecorder(FILE, 4, []).close()
    assert steps() == [3, 3]
