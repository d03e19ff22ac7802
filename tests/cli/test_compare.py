"""`stretto compare`, as a user starts it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stretto_lab.cli import main

QUICK = ["digits-resnet", "--task.width", "4", "--task.batch", "8", "--micro-batches", "2"]


def compare(*words: str) -> dict[str, Any]:
    assert main(["compare", *QUICK, "--out", "results", *words]) == 0
    results: dict[str, Any] = json.loads(Path("results/compare.json").read_text())
    return results


def test_arms_run_in_turns_and_leave_records_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    results = compare(
        "--strategies", "compute,acco:wire=bf16:clock=1,4:lr=0.01", "--updates", "5", "--repeats", "2",
        "--link", "1gbit", "--evaluate-every", "2",
    )  # fmt: skip
    runs = results["runs"]
    assert [(run["repeat"], run["strategy"]) for run in runs] == [
        (repeat, arm) for repeat in (0, 1) for arm in ("compute", "acco:wire=bf16:clock=1,4:lr=0.01")
    ]
    assert [run["learning_rate"] for run in runs] == [None, 0.01, None, 0.01]
    assert [run["wire"] for run in runs] == ["fp32", "bf16", "fp32", "bf16"]
    assert [run["clock"] for run in runs[:2]] == [None, {"minimum": 1, "maximum": 4}]
    assert [run["seed"] for run in runs] == [0, 0, 1, 1]
    for run in runs:
        assert run["updates"] == 5
        assert run["samples_per_second"] > 0
        assert run["heldout_loss"] > 0
        assert run["peak_bytes"] >= run["baseline_bytes"] > 0
        assert run["resolved_strategy"].partition(":")[0] == run["strategy"].partition(":")[0]
        assert run["loss_unit"] == "nats per image"
        assert (run["sent_bytes"] == 0) == (run["strategy"] == "compute")
        assert [one["step"] for one in run["evaluations"]] == [0, 2, 4, 5]
    assert results["environment"]["workers"] == 2
    assert results["environment"]["link"] == "1gbit"
    assert {"torch", "cores", "commit"} <= set(results["environment"])
    shown = capsys.readouterr().out
    assert "repeat 2 of 2: compute" in shown
    assert re.search(r" of +held-out.*\n.* compute ", shown)


@pytest.mark.long
def test_arms_race_to_a_loss_and_those_that_do_not_reach_it_say_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    results = compare(
        "--strategies", "zero1,zero1:lr=1e-9", "--to-loss", "2.0", "--updates", "60", "--evaluate-every", "2"
    )
    reached, missed = results["runs"]
    assert 0 < reached["seconds_to_loss"] < reached["seconds"]
    assert reached["updates"] < missed["updates"] == 60
    assert missed["seconds_to_loss"] is None
