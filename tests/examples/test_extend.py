"""A strategy, a guard and a wire format from outside: one file and one line of registration each."""

import importlib.util
import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stretto import ACCO, DDP, Options, ZeRO1
from stretto.exchange import WIRES
from stretto.guards import GUARDS
from stretto.strategies import STRATEGIES
from stretto_lab.testing import (
    Damage,
    Job,
    differing,
    goes_on,
    guard_faults,
    on_virtual_ranks,
    strategy_faults,
    train,
)
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


def test_the_strategy_keeps_the_laws(load: Any) -> None:
    kind = load("strategy").ReplicatedACCO
    assert strategy_faults(kind, ranks=(1, 3)) == []  # on two ranks it is compared with ACCO below


def test_the_strategy_equals_acco_to_the_bit(load: Any) -> None:
    kinds = (load("strategy").ReplicatedACCO, ACCO)
    jobs = [Job(strategy=kind(), options=Options(allow_unused=True)) for kind in kinds]
    ours, library = (on_virtual_ranks(2, partial(train, job)) for job in jobs)
    assert differing([course.shown for course in library], [course.shown for course in ours]) == []


def test_the_strategy_trains_from_the_command_line_under_a_guard_that_acco_cannot_have() -> None:
    words = ("train", "digits-resnet", *SMALL, "--updates", "3", "--run-dir", "run")
    lines = printed("extend/strategy.py", *words, "--strategy", "replicated-acco", "--guards", "replica")
    assert lines[0] == "replicated-acco on 2 workers (cpu), run"
    assert [record["step"] for record in records("run/updates.jsonl")] == [1, 2, 3]


@pytest.mark.long
def test_the_guard_keeps_its_promise(load: Any) -> None:
    kind = load("guard").Alarm
    promise = Damage(site="masters", outcome="reported")
    assert guard_faults(lambda: (kind(),), (promise,), strategies=(DDP(),)) == []


def test_the_guard_speaks_on_the_command_line() -> None:
    words = ("train", "digits-resnet", *SMALL, "--updates", "3", "--run-dir", "run", "--workers", "3")
    fault = "masters:rank=1:instant=1:pattern=sign"
    lines = printed("extend/guard.py", *words, "--strategy", "ddp", "--guards", "alarm", "--faults", fault)
    assert any("masters damaged (bucket 0; rank 1): none" in line for line in lines)
    assert {tuple(record["ranks"]) for record in records("run/incidents.jsonl")} == {(1,)}


@pytest.mark.long
def test_the_wire_goes_on_to_the_bit_under_a_verified_exchange(load: Any) -> None:
    load("wire")
    options = Options(wire="largest", verified=True, bucket_bytes=4096, allow_unused=True)
    assert goes_on(Job(strategy=ZeRO1(), options=options), 2) == []


def test_the_wire_trains_from_the_command_line() -> None:
    words = ("train", "digits-resnet", *SMALL, "--updates", "2", "--run-dir", "run", "--wire", "largest")
    printed("extend/wire.py", *words, "--strategy", "ddp")
    assert [record["step"] for record in records("run/updates.jsonl")] == [1, 2]
    assert json.loads(Path("run/config.json").read_text())["wire"] == "largest"
