"""`stretto train` and `stretto resume`, as a user starts them. Tests that only look at a run share one."""

import dataclasses
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import redirect_stdout
from itertools import islice
from pathlib import Path

import pytest
import torch

from stretto.records import Update
from stretto_lab.cli import main
from stretto_lab.cli.screens import advice, print_run
from stretto_lab.observe import read_json_lines
from stretto_lab.recipes import recipe
from stretto_lab.train.configuration import RunConfig
from stretto_lab.train.outcome import Outcome
from tests.cli.test_stops import from_nothing, with_imports_made
from tests.draws import seeds
from tests.processes import Command, without_waits

QUICK = ["digits-resnet", "--task.width", "4", "--task.batch", "8", "--evaluate-every", "3"]
TINY = f"{Path(__file__).parents[1] / 'train' / 'tiny.py'}:Tiny"
SHARED = [*QUICK, "--updates", "4", "--micro-batches", "2", "--checkpoint-every", "2"]
Finished = tuple[Path, list[str]]
"""The folder of a whole run, and what the command printed beside its workers."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("finished") / "run"
    with redirect_stdout(io.StringIO()) as shown:
        assert main(["train", *SHARED, "--run-dir", str(folder)]) == 0
    return folder, [*without_waits(shown.getvalue().splitlines())]


def test_one_command_trains_and_leaves_a_whole_folder(finished: Finished) -> None:
    run, _ = finished
    records = read_json_lines(run / "updates.jsonl")
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert [record for record in records if not set(Update.__slots__) <= set(record)] == []
    assert [record["step"] for record in read_json_lines(run / "evaluations.jsonl")] == [0, 3, 4]
    config = json.loads((run / "config.json").read_text())
    assert (config["strategy"], config["task"]["width"], config["updates"]) == ("zero1", 4, 4)
    assert {path.name for path in run.iterdir()} == {
        ".lock", "checkpoints", "config.json", "evaluations.jsonl", "memory.jsonl", "model.pt", "report.html",
        "tensorboard", "updates.jsonl",
    }  # fmt: skip


def test_the_page_of_a_run_says_how_many_parameters_it_has(finished: Finished) -> None:
    run, _ = finished
    state = torch.load(run / "model.pt", weights_only=True)
    learned = [name for name in state if "running_" not in name and "num_batches" not in name]
    count = sum(state[name].numel() for name in learned)
    assert json.loads((run / "config.json").read_text())["parameters"] == count
    assert re.search(rf"parameters</dt>\s*<dd>{count:,}<", (run / "report.html").read_text())


def test_the_end_says_what_to_do_next(finished: Finished) -> None:
    run, lines = finished
    assert lines[:2] == [f"zero1 on 2 workers (cpu), {run}", "starting the workers"]
    assert lines[2].startswith("4 updates in ")
    assert lines[3].startswith("held-out loss 2.")
    assert lines[4].startswith("held-out accuracy ")
    assert lines[5:] == [
        "",
        f"the run is in   {run}",
        f"to continue     stretto resume {run} --updates 8",
        f"look at it      tensorboard --logdir {run}",
        f"in a browser    {run}/report.html",
    ]


@pytest.mark.long
def test_a_launcher_of_torch_starts_the_same_run() -> None:
    quick = [TINY, "--updates", "4", "--no-tensorboard"]
    assert main(["train", *quick, "--run-dir", "ours"]) == 0
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["stretto", "train", *quick, "--run-dir", "launched"]
    with Command("-m", *launcher, "-m", *words) as torchrun:  # which starts the ranks from nothing
        shown, complaint = torchrun.communicate()
    assert torchrun.returncode == 0, complaint
    first = [*islice(without_waits(shown.splitlines()), 2)]
    assert first == ["loading PyTorch", "zero1 on 2 workers (cpu), launched"]
    losses = [
        [record["loss"] for record in read_json_lines(folder / "updates.jsonl")]
        for folder in (Path("ours"), Path("launched"))
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4


def test_a_run_goes_on_with_the_options_that_it_had(
    finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished[0], "moved")
    assert main(["resume", "moved", "--updates", "6"]) == 0
    assert [record["step"] for record in read_json_lines(Path("moved/updates.jsonl"))] == [1, 2, 3, 4, 5, 6]
    config = json.loads(Path("moved/config.json").read_text())
    assert (config["task"]["width"], config["updates"], config["run_dir"]) == (4, 6, "moved")
    place = SHARED.index("--updates")  # the length that is given takes the place of the one before
    others = [*SHARED[1:place], *SHARED[place + 2 :]]
    assert config["command"]["options"] == [*others, "--run-dir", str(finished[0]), "--updates", "6"]
    assert "to continue     stretto resume moved --updates 12" in capsys.readouterr().out


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(
    ("options", "code"),
    [(["--task.width", "8", "--updates", "6"], 1), (["--strategy", "ddp"], 0)],
    ids=["another model", "at its end"],
)
def test_a_resume_that_trains_nothing_leaves_the_options_that_the_run_had(
    options: list[str], code: int, finished: Finished, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished[0], "run")
    before = Path("run/config.json").read_text()
    assert main(["resume", "run", *options]) == code
    assert ("ForeignCheckpoint" in capsys.readouterr().err) == bool(code)
    assert Path("run/config.json").read_text() == before


def test_a_worker_that_fails_is_named_in_one_line_and_leaves_no_folder_of_a_run_that_never_began(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Only the workers read the data: there are fewer images than that.
    assert main(["train", *QUICK, "--task.batch", "9999"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match("stretto: rank [01] of 2 local workers failed: ConfigError: a micro-batch of 9999", line)
    assert list(Path().iterdir()) == []


def test_a_resume_tells_of_a_recipe_file_that_has_changed_and_of_the_update_behind_which_it_goes_on(
    finished: Finished, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    Path("own_copy.py").write_text("from stretto_lab.recipes import DigitsResNet as Digits\n")
    shutil.copytree(finished[0], "run")
    config = json.loads(Path("run/config.json").read_text())
    place = f"{Path.cwd() / 'own_copy.py'}:Digits"
    config["command"] |= {"recipe": place, "digest": "of another content"}
    Path("run/config.json").write_text(json.dumps(config))
    with Command("-m", "stretto", "resume", "run", place) as resumed:  # at its end already
        shown, _ = resumed.communicate()
    assert resumed.returncode == 0
    assert shown.startswith(f"note: {place} has changed since this run began\n")
    assert "resuming after update 4\n" in shown
    assert main(["resume", "run", place.replace("own_copy", "own_gone")]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("stretto: there is no recipe file ")


@pytest.mark.long(keep=1)
@pytest.mark.parametrize(
    ("begin", "loading", "every", "last"),
    [
        (from_nothing, ["loading PyTorch\n"], "1", "to continue: stretto resume run"),
        (with_imports_made, [], "90000", "to continue: stretto resume run"),
    ],
)
def test_the_start_is_told_step_by_step_and_ctrl_c_ends_all_workers_and_says_how_to_go_on(
    begin: Callable[[list[str]], subprocess.Popen[str] | Command], loading: list[str], every: str, last: str
) -> None:
    words = ["train", TINY, "--updates", "100000", "--run-dir", "run"]
    words += ["--no-tensorboard", "--checkpoint-every", every, "--evaluate-every", "3"]
    with begin(words) as run:
        try:
            started = [*islice(without_waits(run.stdout), len(loading) + 6)]
            next(line for line in run.stdout if " after 3 updates" in line)
            os.killpg(run.pid, signal.SIGINT)  # as a terminal does: the launcher and every worker
            # The workers write to the same pipe, so it ends when the last of them has.
            shown, complaint = run.communicate()
        finally:
            run.kill()
    assert (run.returncode, complaint) == (130, "interrupted\n")
    *told, ready, evaluated, updated = started
    assert told == [
        *loading,
        "zero1 on 2 workers (cpu), run\n",
        "starting the workers\n",
        "workers have started on cpu: reading data, building the model\n",
    ]
    assert re.fullmatch(r"data and model are ready: [\d,]+ parameters\n", ready)
    assert evaluated.startswith("held-out loss 1.")
    assert re.fullmatch(r"update 1/100000  loss 1\.\d+\n", updated)
    assert shown.splitlines()[-1] == last


def test_ctrl_c_lets_a_run_that_survives_losses_land_and_save_too() -> None:
    words = ["train", TINY, "--updates", "100000", "--run-dir", "run", "--no-tensorboard"]
    with with_imports_made([*words, "--workers", "3", "--survive"]) as run:
        try:
            next(line for line in run.stdout if line.startswith("update 1/"))
            os.killpg(run.pid, signal.SIGINT)
            shown, complaint = run.communicate()
        finally:
            run.kill()
    assert (run.returncode, complaint) == (130, "interrupted\n")
    assert shown.splitlines()[-1] == "to continue: stretto resume run"
    assert len([*Path("run", "checkpoints").iterdir()]) == 1


@pytest.mark.parametrize("seed", seeds(12))
def test_after_a_resume_shares_and_rates_are_of_what_they_say(
    seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(seed)
    before, here = draw.uniform(1, 50), draw.uniform(1, 50)
    waiting, rate, step = draw.uniform(0.3, 0.9), draw.uniform(10, 900), draw.randint(1, 90)
    measured = dict.fromkeys(Outcome.__slots__, 0) | {"sample": None, "accuracy": None}
    outcome = Outcome(
        **{
            **measured,
            "updates": step + 10,
            "resumed_from": step,
            "training_seconds": before + here,
            "seconds_before": before,
            "exposed_seconds": waiting * here,
            "samples_per_second": rate,
        }
    )
    print_run(outcome, RunConfig(task=recipe("digits-resnet"), run_dir="run"), is_on_a_link=True)
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        f"{step + 10} updates in {before + here:.1f} s; 10 of them here, in {here:.1f} s, {rate:,.0f} samples/s"
        in shown
    )
    assert f"{waiting:.0%} of the time since update {step} waited" in shown
    fresh = dataclasses.replace(outcome, resumed_from=0, seconds_before=0.0, training_seconds=here)
    assert advice(fresh, RunConfig(task=recipe("digits-resnet"))) == advice(
        outcome, RunConfig(task=recipe("digits-resnet"))
    ).replace(f" since update {step}", "")


@pytest.mark.parametrize(
    ("waiting", "strategy", "is_told"), [(0.8, "zero1", True), (0.1, "zero1", False), (0.8, "acco", False)]
)
def test_a_link_that_was_the_bottleneck_is_told(waiting: float, strategy: str, is_told: bool) -> None:
    measured = dict.fromkeys((field for field in Outcome.__slots__), 0)
    outcome = Outcome(**{**measured, "training_seconds": 10.0, "exposed_seconds": 10.0 * waiting})
    found = advice(outcome, RunConfig(task=recipe("digits-resnet"), strategy=strategy))
    assert found.startswith("The link was the bottleneck: 80% of the time waited") == is_told == bool(found)
