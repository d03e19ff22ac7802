"""`stretto simulate` end to end."""

from pathlib import Path

import pytest

from stretto_lab.cli import main
from stretto_lab.cli.commands import CONFIGURE
from stretto_lab.cli.options import parse_options
from stretto_lab.observe import read_json_lines


def test_a_recipe_is_simulated_and_its_outcome_printed(capsys: pytest.CaptureFixture[str]) -> None:
    words = "simulate digits-resnet --ranks 2 --network 100mbit --strategy acco --updates 2 --micro-batches 2 --seed 3"
    assert main([*words.split(), "--slow", "1=2.5", "--run-dir", "simulated"]) == 0
    shown = capsys.readouterr().out
    assert "acco on 2 virtual ranks, network 100mbit, seed 3" in shown
    assert "update 1/2  loss " in shown
    assert " of virtual time left" in shown
    assert "2 updates in " in shown
    assert "records, trace and the model are in simulated" in shown
    assert len(read_json_lines(Path("simulated", "updates.jsonl"))) == 2
    next_command = "stretto plan digits-resnet --ranks 2 --network 100mbit --slow 1=2.5"
    assert next_command in shown
    recipe, plan = parse_options("plan", next_command.split()[2:], CONFIGURE["plan"])
    assert (recipe, plan.ranks, plan.network, plan.slow) == ("digits-resnet", (2,), "100mbit", {1: 2.5})
    assert {"config.json", "trace.jsonl", "model.pt"} <= {path.name for path in Path("simulated").iterdir()}
