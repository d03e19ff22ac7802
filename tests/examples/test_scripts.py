"""Every script of `examples/` runs as it stands, and what it prints is what it promises."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from stretto_lab.observe import read_json_lines
from tests.examples.scripts import EXAMPLES, printed, printed_by_ranks
from tests.processes import Command

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))


def losses(lines: list[str]) -> list[float]:
    """Every number behind the word loss, in order."""
    return [float(found) for found in re.findall(r"loss ([0-9.]+)", "\n".join(lines))]


def test_the_plain_loop_and_ours_end_with_the_same_parameters() -> None:
    lines = printed("plain_loop.py")
    assert lines[-1] == "equal to the plain loop: True"
    assert [line.partition(":")[0] for line in lines[:-2]] == [f"update {step}" for step in range(16, 81, 16)]
    assert losses(lines)[-1] < 0.2 < 1 < losses(lines)[0]


@pytest.mark.long
def test_torchrun_needs_nothing_but_the_script() -> None:
    alone, launched = printed("torchrun.py"), printed("torchrun.py", launcher=TORCHRUN)
    assert [line.partition(",")[0] for line in alone] == ["320 updates on 1 ranks"]
    assert [line.partition(",")[0] for line in launched] == ["160 updates on 2 ranks"]
    assert losses(launched)[0] < 0.1
    assert set(torch.load("model.pt")) == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.long
def test_shards_of_a_node_train_as_one_model() -> None:
    (line,) = printed_by_ranks("sharded.py", 2)
    assert line.startswith("160 updates on 1 nodes of 2 shards, loss ")
    assert losses([line])[0] < 0.1
    assert Path("model/.metadata").is_file()


@pytest.mark.long
def test_lora_sends_and_saves_the_adapters_alone() -> None:
    first, *lines, last = printed_by_ranks("lora.py", 2)
    trained, total = map(int, re.findall(r"\d+", first))
    sent = [int(found) for line in lines for found in re.findall(r"(\d+) bytes", line)]
    assert losses(lines)[-1] < 1 < losses(lines)[0] * 2
    # Half of the gradients to the other rank, half of the parameters back, and a small record of the round.
    assert [count for count in sent if not 4 * trained <= count < 4 * trained * 1.05] == []
    assert len(sent) == 3
    assert last == "the adapters are in the folder adapters"
    assert Path("adapters/adapter_model.safetensors").stat().st_size < 2 * 4 * trained < 4 * total / 2


def test_echo_takes_more_steps_from_the_same_batches() -> None:
    measured, once, again = printed("echo.py")
    assert measured.startswith("e* is ")
    assert once.startswith("40 fresh batches, 0 used again, ")
    assert again.startswith("40 fresh batches, 80 used again, ")
    assert losses([again])[0] < losses([once])[0]


def test_guards_give_back_the_undisturbed_run_to_the_bit() -> None:
    _, harmed, _, incident, repaired = printed("guards.py")
    assert float(harmed.rpartition(" ")[2]) > 0.1
    assert incident.strip() == "update 11: masters damaged (bucket 0; rank 0): mended"
    assert float(repaired.rpartition(" ")[2]) == 0


@pytest.mark.long
def test_every_remedy_gains_what_its_example_says() -> None:
    lines = printed("remedies.py")
    names = [line.partition("  loss ")[0].strip() for line in lines]
    seconds = dict(zip(names, [float(line.split()[-2]) for line in lines], strict=True))
    read = dict(zip(names, [int(line.split()[-5]) for line in lines], strict=True))
    loss = dict(zip(names, losses(lines), strict=True))
    fewer = names[-1]
    assert fewer == "no echo, as many batches"
    assert [name for name in names if read[name] == 128] == ["all remedies", "no hiding", "no guards", fewer]
    assert {read[name] for name in names} == {128, 256}
    # An update computes 40 ms. Without hiding an exchange of about 20 ms comes behind it; four reads take 80 ms.
    assert 64 * 0.040 <= seconds["all remedies"] < 1.1 * 64 * 0.040
    assert seconds["no hiding"] > 1.3 * seconds["all remedies"]
    assert seconds["no echo"] >= 64 * 0.080
    assert loss["no guards"] > 1.5 * loss["all remedies"]
    assert loss["all hazards, no remedy"] > 1.5 * loss["no hazard, no remedy"]


@pytest.mark.long
def test_a_rank_is_killed_the_others_go_on_and_another_comes_in() -> None:
    # It starts processes of its own, which read the script again.
    program = [sys.executable, str(EXAMPLES / "survive.py")]
    lines = subprocess.run(program, capture_output=True, text=True, check=True).stdout.splitlines()
    first, second, *more = [line for line in lines if line.startswith("term")]
    assert first == "term 0: 3 ranks, from update 0"
    assert second in [f"term 1: {ranks} ranks, from update 16" for ranks in (2, 3)]
    assert "3 ranks" in [second, *more][-1]
    assert lines[-1].startswith("update 200: ")
    assert losses(lines)[-1] < losses(lines)[0]


def test_a_file_of_tokens_is_mapped_and_its_windows_are_its_tokens() -> None:
    numbers = np.random.default_rng(0).integers(1, 2**16, 1003, dtype=np.uint16)
    numbers.tofile("train.bin")
    windows = runpy.run_path(str(EXAMPLES / "tokens.py"))["TokenFile"](length=10, end=0).mapped("train.bin")
    assert len(windows) == 100
    inputs, targets, predicted = windows.batch(torch.tensor([99, 0]))
    assert inputs.tolist() == [numbers[990:1000].tolist(), numbers[:10].tolist()]
    assert targets.tolist() == [numbers[991:1001].tolist(), numbers[1:11].tolist()]
    assert predicted == 20


@pytest.mark.long
def test_the_recipe_learns_on_two_workers_with_options_of_its_own() -> None:
    options = "--updates 100 --task.hidden 16 --task.lr 0.05 --no-tensorboard --run-dir run"
    arguments = ["train", f"{EXAMPLES / 'recipe.py'}:sine", *options.split()]
    with Command("-m", "stretto", *arguments) as command:
        _, complaint = command.communicate()
    assert (command.returncode, complaint) == (0, "")
    first, *_, last = [row["heldout_loss"] for row in read_json_lines(Path("run/evaluations.jsonl"))]
    assert last < first / 10
    assert json.loads(Path("run/config.json").read_text())["task"]["hidden"] == 16
    assert torch.load("run/model.pt")["0.weight"].shape == (16, 1)


@pytest.mark.long
def test_a_run_on_nodes_goes_on_on_other_ranks() -> None:
    assert printed_by_ranks("four_nodes.py", 2, "--run-dir", "gpt", "--updates", "10") == [
        "10 updates on 2 ranks"
    ]
    assert printed_by_ranks("four_nodes.py", 3, "--run-dir", "gpt", "--updates", "20") == [
        "20 updates on 3 ranks"
    ]
    assert [row["step"] for row in read_json_lines(Path("gpt/updates.jsonl"))] == list(range(1, 21))
    losses = [row["heldout_loss"] for row in read_json_lines(Path("gpt/evaluations.jsonl"))]
    assert losses[-1] < losses[0]
    assert Path("gpt/model.pt").is_file()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_short_and_is_listed_in_the_readme(script: str) -> None:
    assert len((EXAMPLES / script).read_text(encoding="utf-8").splitlines()) < 80
    assert f"(examples/{script})" in (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    runs = f"(printed\\(|printed_by_ranks\\(|EXAMPLES / )[\"']{script}"
    assert re.search(runs, Path(__file__).read_text(encoding="utf-8"))
