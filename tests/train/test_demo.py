"""A demonstration: arms that differ in one remedy, faults that do harm without guards, and numbers that agree."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from stretto.groups import Link
from stretto_lab.faults import Fault
from stretto_lab.observe import print_demo, replace_json
from stretto_lab.page.results import read_demo
from stretto_lab.train.configuration import RunConfig
from stretto_lab.train.demo import ALL_OFF, ALL_ON, CLEAN, DemoConfig, arms_of, demonstrate
from stretto_lab.train.launch import LocalRanks
from tests.page.pages import numbers, page_of, shown
from tests.terminal import print_on_a_terminal
from tests.train.runs import model_bits, train
from tests.train.tiny import Tiny

FAULTS = (
    Fault(site="masters", rank=0, instant=4, pattern="power"),
    Fault(site="gathered values", rank=1, instant=6, extent="all", pattern="power"),
)
CONFIG = DemoConfig(
    task=Tiny(width=128),
    updates=9,
    micro_batches=2,
    evaluate_every=2,
    link_slowness=0.5,
    loader_slowness=0.25,
    faults=FAULTS,
    timeout_seconds=120,
)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a demonstration on the tiny task returned; its folder is `out`."""
    out = str(tmp_path_factory.mktemp("demo") / "out")
    return demonstrate(dataclasses.replace(CONFIG, out=out), LocalRanks(2), lambda line: None)


def changed(one: RunConfig[Any], other: RunConfig[Any]) -> dict[str, Any]:
    """The settings in which a run differs from another one."""
    before, after = dataclasses.asdict(one), dataclasses.asdict(other)
    return {name: value for name, value in after.items() if value != before[name]}


def test_each_arm_leaves_out_exactly_one_remedy() -> None:
    arms = arms_of(dataclasses.replace(CONFIG, link="1mbit", slow_loader="5"))
    assert {name: changed(arms[ALL_ON], run) for name, run in arms.items() if name.startswith("no ")} == {
        "no overlap": {"strategy": "zero1"},
        "no packed wire": {"wire": "fp32"},
        "no echoing": {"echo": "none"},
        "no guards": {"guards": ()},
    }
    nothing = {"strategy": "zero1", "wire": "fp32", "echo": "none", "guards": ()}
    assert changed(arms[ALL_ON], arms[ALL_OFF]) == nothing
    assert changed(arms[ALL_OFF], arms[CLEAN]) == {"link": "none", "slow_loader": "none", "faults": ()}


def test_a_remedy_that_was_never_on_has_no_arm() -> None:
    arms = arms_of(dataclasses.replace(CONFIG, echo="none", strategy="zero1"))
    assert list(arms) == [CLEAN, ALL_OFF, ALL_ON, "no packed wire", "no guards"]


def test_what_a_strategy_sets_for_itself_holds_for_all_arms() -> None:
    arms = arms_of(dataclasses.replace(CONFIG, strategy="acco:first=1:lr=0.5"))
    assert {dataclasses.asdict(run)["task"]["lr"] for run in arms.values()} == {0.5}
    assert arms["no guards"].strategy == "acco:first=1:lr=0.5"


def test_link_and_loader_are_slow_in_relation_to_the_clean_run(demo: dict[str, Any]) -> None:
    clean, *others = demo["runs"]
    assert (clean["arm"], clean["link"], clean["slow_loader"]) == (CLEAN, "none", "none")
    seconds = clean["seconds"] / clean["updates"]
    for run in others:
        busy = Link.parse(run["link"]).occupied_seconds(clean["sent_bytes"] / clean["updates"])
        assert busy == pytest.approx(CONFIG.link_slowness * seconds, rel=0.01)
        loading = float(run["slow_loader"]) / 1000 * CONFIG.micro_batches
        assert loading == pytest.approx(CONFIG.loader_slowness * seconds, rel=0.05)


def test_faults_change_the_outcome_without_guards_and_change_no_bit_with_them(demo: dict[str, Any]) -> None:
    runs = {run["arm"]: run for run in demo["runs"]}
    # A link, a loader and times change no bit, so a run without any hazard is what the guarded one has to equal.
    train(dataclasses.replace(arms_of(CONFIG)[ALL_ON], faults=(), run_dir="healthy"))
    folder = Path(demo["out"], "seed-0")
    assert model_bits(str(folder / "all-on")) == model_bits("healthy")
    assert model_bits(str(folder / "no-guards")) != model_bits("healthy")
    assert runs[CLEAN]["faults_struck"] == 0
    for arm, run in runs.items():
        sites = {incident["site"] for incident in run["incidents"]}
        is_guarded = arm not in (CLEAN, ALL_OFF, "no guards")
        assert sites == ({"masters", "gathered values"} if is_guarded else set())
        assert run["faults_struck"] == (0 if arm == CLEAN else 2)


def test_the_target_is_the_clean_loss_after_two_thirds_of_the_updates(demo: dict[str, Any]) -> None:
    (reached,) = [one["heldout_loss"] for one in demo["runs"][0]["evaluations"] if one["step"] == 6]
    assert {run["target"] for run in demo["runs"]} == {reached}


def test_table_page_and_file_have_the_same_numbers(
    demo: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_on_a_terminal(monkeypatch)
    out = Path(demo["out"])
    written = json.loads((out / "demo.json").read_text())
    assert written["runs"] == json.loads(json.dumps(demo["runs"]))
    print_demo(demo["runs"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    page = page_of(out)
    drawn = numbers(page)["runs"]
    assert [run["name"] for run in drawn] == [run["arm"] for run in demo["runs"]]
    for run, curve in zip(demo["runs"], drawn, strict=True):
        (row,) = [line.split() for line in lines if line.startswith(f" {run['arm']} ")]
        assert f"{run['heldout_loss']:.3f}" in row
        assert f"{run['heldout_loss']:.4f}" in shown(page)
        assert row[-2:] == [str(run["faults_struck"]), str(len(run["incidents"]))]
        assert curve["heldout"]["y"] == [one["heldout_loss"] for one in run["evaluations"]]
        assert curve["heldout"]["seconds"][-1] == run["evaluations"][-1]["training_seconds"]
    assert '<option value="seconds" selected>' in page


def test_an_arm_that_misses_the_target_is_told_by_a_lower_bound(capsys: pytest.CaptureFixture[str]) -> None:
    whole = {"updates": 4, "exposed_seconds": 1.0, "wait_seconds": 1.0, "faults_struck": 0, "incidents": []}
    told = (("clean", 8.0, 4.0, 1.0), ("all off", 90.0, None, 3.0), ("all on", 20.0, 10.0, 1.5))
    runs = [
        {
            **whole, "arm": arm, "seed": seed, "seconds": seconds, "seconds_to_loss": reached, "heldout_loss": loss,
            "target": 2.0,
        }
        for seed in (0, 1)
        for arm, seconds, reached, loss in told
    ]  # fmt: skip
    print_demo(runs)
    text = " ".join(capsys.readouterr().out.split())
    assert "all off - >9.00" in text
    assert "needs 10.0 s to the target and ends +0.500 from the clean" in text
    assert "with none of them it takes more than 9.00 times as long and ends at +2.000" in text
    print_demo([{**run, "heldout_loss": None} if run["arm"] == "all off" else run for run in runs])
    assert "9.00 times as long and ends with no finite loss" in " ".join(capsys.readouterr().out.split())
    print_demo([{**run, "seconds_to_loss": None} for run in runs])
    assert "did not reach the target" in " ".join(capsys.readouterr().out.split())


def test_a_page_of_several_seeds_names_the_hazards_of_the_one_that_it_draws(
    demo: dict[str, Any], tmp_path: Path
) -> None:
    later = [{**run, "seed": 1, "link": "7mbit", "slow_loader": "99"} for run in demo["runs"]]
    replace_json(tmp_path / "demo.json", {**demo, "runs": [*demo["runs"], *later]})
    facts = read_demo(tmp_path, "several").facts
    struck = demo["runs"][-1]
    assert (facts["drawn"], facts["slow link"]) == ("seed 0", struck["link"])
    assert facts["slow loader, ms per micro-batch"] == struck["slow_loader"]
