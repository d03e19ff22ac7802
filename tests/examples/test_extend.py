"""A strategy, a guard and a wire format from outside: one file and one line of registration each."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from stretto import ACCO, DDP, Options, ZeRO1
from stretto.exchange import WIRES
from stretto.guards import GUARDS, Guard
from stretto.strategies import STRATEGIES, Strategy
from stretto_lab.testing import Damage, GuardConformance, StrategyConformance
from stretto_lab.testing.jobs import Job, saved_and_resumed, train
from stretto_lab.virtual import VirtualCluster
from tests.examples.scripts import EXAMPLES, printed

EXTEND = EXAMPLES / "extend"
SMALL = ("--task.width", "4", "--task.batch", "8", "--micro-batches", "2", "--no-tensorboard")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a file of `examples/extend/`; what it has registered is forgotten afterwards."""
    for names in (STRATEGIES, GUARDS, WIRES):
        for name in ("replicated-acco", "alarm", "largest"):
            monkeypatch.setitem(names, name, None)  # so that its absence is put back at the end
            del names[name]

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"extend_{name}", EXTEND / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


def records(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name", ["strategy", "guard", "wire"])
def test_a_file_registers_itself_in_one_line(load: Any, name: str) -> None:
    names = {"strategy": STRATEGIES, "guard": GUARDS, "wire": WIRES}[name]
    known = set(names)
    load(name)
    assert len(set(names) - known) == 1
    lines = (EXTEND / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert sum("# the line of registration" in line for line in lines) == 1


def test_the_strategy_passes_the_kit_for_strategies(load: Any) -> None:
    kind = load("strategy").ReplicatedACCO

    class Kit(StrategyConformance):
        world_sizes = (1, 3)  # on two ranks it is compared with ACCO below

        def make_strategy(self) -> Strategy:
            return kind()

    assert Kit().failures() == {}


def test_the_strategy_equals_acco_to_the_bit(load: Any) -> None:
    kind = load("strategy").ReplicatedACCO

    def courses(strategy: Strategy) -> Any:
        job = Job(strategy=strategy, micro_batches=2, options=Options())
        return VirtualCluster(2).run(lambda rank, group: train(job, rank, group)).values

    for ours, library in zip(courses(kind()), courses(ACCO()), strict=True):
        for state, expected in zip(ours.shown, library.shown, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(state, expected, strict=True))


def test_the_strategy_trains_from_the_command_line_under_a_guard_that_acco_cannot_have() -> None:
    words = ("train", "digits-resnet", *SMALL, "--updates", "3", "--run-dir", "run")
    lines = printed("extend/strategy.py", *words, "--strategy", "replicated-acco", "--guards", "replica")
    assert lines[0] == "replicated-acco on 2 workers (cpu), run"
    assert [record["step"] for record in records("run/updates.jsonl")] == [1, 2, 3]


def test_the_guard_keeps_its_promise_in_the_kit_for_guards(load: Any) -> None:
    kind = load("guard").Alarm

    class Kit(GuardConformance):
        promises = (Damage(site="masters", outcome="reported"),)
        strategies = (DDP(),)

        def make_guards(self) -> tuple[Guard, ...]:
            return (kind(),)

    assert Kit().failures() == {}


def test_the_guard_speaks_on_the_command_line() -> None:
    words = ("train", "digits-resnet", *SMALL, "--updates", "3", "--run-dir", "run", "--workers", "3")
    fault = "masters:rank=1:instant=1:pattern=sign"
    lines = printed("extend/guard.py", *words, "--strategy", "ddp", "--guards", "alarm", "--faults", fault)
    assert any("masters damaged (bucket 0; rank 1): none" in line for line in lines)
    assert {tuple(record["ranks"]) for record in records("run/incidents.jsonl")} == {(1,)}


def test_the_wire_learns_under_a_verified_exchange_and_resumes_to_the_bit(load: Any, tmp_path: Path) -> None:
    load("wire")
    options = Options(wire="largest", verified=True, bucket_bytes=512)
    job = Job(strategy=ZeRO1(), micro_batches=2, options=options)
    findings = (
        VirtualCluster(2).run(lambda rank, group: saved_and_resumed(job, str(tmp_path), rank, group)).values
    )
    assert findings == ([], [])


def test_the_wire_trains_from_the_command_line() -> None:
    words = ("train", "digits-resnet", *SMALL, "--updates", "2", "--run-dir", "run", "--wire", "largest")
    printed("extend/wire.py", *words, "--strategy", "ddp")
    assert [record["step"] for record in records("run/updates.jsonl")] == [1, 2]
    assert json.loads(Path("run/config.json").read_text())["wire"] == "largest"
