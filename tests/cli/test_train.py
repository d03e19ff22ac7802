"""`stretto train`, as a user starts it."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.cli import main
from stretto.observe import read_json_lines
from stretto.records import Update

QUICK = ["digits-resnet", "--task.width", "4", "--task.batch", "8", "--evaluate-every", "3"]


def test_one_command_trains_and_leaves_a_whole_folder(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *QUICK, "--updates", "4", "--run-dir", "run", "--checkpoint-every", "2"]) == 0
    shown, complaint = capfd.readouterr()
    assert complaint == ""
    lines = shown.splitlines()
    assert lines[-4].startswith("4 updates in ")
    assert lines[-3].startswith("held-out loss 2.")
    assert lines[-2].startswith("held-out accuracy ")
    assert lines[-1] == "records, checkpoints and the model are in run"
    records = read_json_lines(Path("run/updates.jsonl"))
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert all(set(Update.__slots__) <= set(record) for record in records)
    assert [record["step"] for record in read_json_lines(Path("run/evaluations.jsonl"))] == [0, 3, 4]
    config = json.loads(Path("run/config.json").read_text())
    assert (config["strategy"], config["task"]["width"], config["updates"]) == ("acco", 4, 4)
    found = {path.name for path in Path("run").iterdir()}
    assert found == {
        "checkpoints", "config.json", "evaluations.jsonl", "model.pt", "tensorboard", "updates.jsonl"
    }  # fmt: skip


def test_a_launcher_of_torch_starts_the_same_run() -> None:
    words = ["train", *QUICK, "--updates", "3", "--micro-batches", "2", "--no-tensorboard"]
    assert main([*words, "--run-dir", "local"]) == 0
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    launched = subprocess.run(
        [sys.executable, "-m", *launcher, "-m", "stretto", *words, "--run-dir", "launched"],
        capture_output=True,
        text=True,
    )
    assert launched.returncode == 0, launched.stderr
    assert launched.stdout.splitlines()[0] == "acco on 2 workers, link none, launched"
    losses = [
        [record["loss"] for record in read_json_lines(Path(folder, "updates.jsonl"))]
        for folder in ("local", "launched")
    ]
    assert losses[0] == losses[1]


def test_a_run_goes_on_where_it_was_left(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", *QUICK, "--micro-batches", "2", "--no-tensorboard", "--run-dir", "run"]
    assert main([*words, "--updates", "2"]) == 0
    assert main([*words, "--updates", "5", "--resume"]) == 0
    assert [record["step"] for record in read_json_lines(Path("run/updates.jsonl"))] == [1, 2, 3, 4, 5]
    assert capsys.readouterr().out.count("records, checkpoints and the model are in run") == 2


def test_a_worker_that_fails_is_named_in_one_line_with_exit_code_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Only the workers read the data: there are fewer images than that.
    assert main(["train", *QUICK, "--run-dir", "run", "--task.batch", "9999"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match("stretto: rank [01] of 2 local workers failed: ConfigError: a micro-batch of 9999", line)


def test_a_loss_that_is_not_finite_ends_the_run_with_rank_and_step(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["train", *QUICK, "--run-dir", "run", "--task.lr", "1e30", "--strategy", "zero1"]
    assert main(words) == 1
    first = capsys.readouterr().err.splitlines()[0]
    assert re.search("rank ([01]) of 2 local workers failed: NonFinite: rank \\1, step", first)


def test_a_rank_that_is_hit_again_and_again_is_left_out_and_the_run_ends_well(
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = [
        "train",
        *QUICK,
        "--workers",
        "3",
        "--updates",
        "8",
        "--checkpoint-every",
        "2",
        "--run-dir",
        "run",
    ]
    words += ["--no-tensorboard", "--strategy", "zero1", "--guards", "rest", "--verified"]
    assert main([*words, "--faults", "masters:rank=1:instant=3:lasts=sticky"]) == 0
    shown, complaint = capfd.readouterr()
    assert complaint == ""
    for step in (4, 5, 6):
        assert f"update {step}: masters damaged (bucket 0; rank 1): mended" in shown
    assert "going on from 000003-step-6 without rank 1: 2 of 3 workers" in shown
    assert "8 updates in" in shown
    (record,) = read_json_lines(Path("run", "quarantine.jsonl"))
    assert (record["error"], record["left_out"]) == ("Quarantined", [1])
    assert len(read_json_lines(Path("run", "incidents.jsonl"))) == 3


def test_ctrl_c_ends_the_run_and_all_its_workers() -> None:
    words = [sys.executable, "-m", "stretto", "train", *QUICK, "--updates", "100000", "--run-dir", "run"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, start_new_session=True, **pipes) as run:
        try:
            next(line for line in run.stdout if line.startswith("update 1/"))
            os.killpg(run.pid, signal.SIGINT)  # as a terminal does: the launcher and every worker
            # The workers write to the same pipe, so it ends when the last of them has.
            _, complaint = run.communicate()
        finally:
            run.kill()
    assert (run.returncode, complaint) == (130, "interrupted\n")
