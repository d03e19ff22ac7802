"""`--seed` decides every draw of a run, unless the option that draws has a seed of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stretto.fields import field_types
from stretto.guards import GUARDS
from stretto.guards.text import parse_guards
from stretto.strategies import STRATEGIES
from stretto_lab.faults import FaultPlan, parse_faults
from stretto_lab.observe import read_json_lines
from stretto_lab.train.arms import parse_arm
from stretto_lab.train.comparison import _run_of
from stretto_lab.train.configuration import CompareConfig, RunConfig
from stretto_lab.train.rates import strategy_of
from stretto_lab.train.simulation import SimulateConfig, simulate
from tests.draws import part
from tests.train.tiny import Tiny


def drawn(folder: Path, read: Callable[[Path], Any], seed: int, **settings: Any) -> Any:
    """Return what a run has drawn."""
    simulate(
        SimulateConfig(
            task=Tiny(), ranks=2, network="free", updates=24, run_dir=str(folder), seed=seed, **settings
        )
    )
    return read(folder)


def gaps(folder: Path) -> list[int]:
    return [record["gap"] for record in read_json_lines(folder / "updates.jsonl")]


def uses(folder: Path) -> list[int]:
    return [record["uses"] for record in read_json_lines(folder / "updates.jsonl")]


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_json_lines(folder / "updates.jsonl")]


def strikes(folder: Path) -> list[Any]:
    return [record["step"] for record in read_json_lines(folder / "strikes" / "rank-1.jsonl")]


FAULT = parse_faults("contribution:rank=1:lasts=sticky:rate=0.3:bits=1")
DRAWS: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "averages": (gaps, {"strategy": "local:rate=0.5:plan=bernoulli"}),
    "averages with the echo": (
        gaps,
        {"strategy": "local:rate=0.5:plan=bernoulli", "echo": "bernoulli:p=0.5"},
    ),
    "echoes": (uses, {"echo": "bernoulli:p=0.5"}),
    "parameters, order of the data, dropout": (losses, {}),
    "faults": (strikes, {"faults": FAULT, "micro_batches": 1}),
}


@pytest.mark.parametrize("what", part(DRAWS))
def test_another_seed_draws_otherwise_and_the_same_one_alike(what: str, tmp_path: Path) -> None:
    read, settings = DRAWS[what]
    first, again, other = (
        drawn(tmp_path / str(number), read, seed, **settings) for number, seed in enumerate((0, 0, 5))
    )
    assert first == again != other


@pytest.mark.parametrize("name", [name for name, kind in STRATEGIES.items() if "seed" in field_types(kind)])
def test_a_strategy_draws_from_the_seed_of_its_run_or_from_its_own(name: str) -> None:
    run = RunConfig(task=Tiny(), seed=5)
    drawing: list[Any] = [strategy_of(parse_arm(text), run, None) for text in (name, f"{name}:seed=3")]
    assert [one.seed for one in drawing] == [5, 3]


@pytest.mark.parametrize("name", [name for name, kind in GUARDS.items() if "seed" in field_types(kind)])
def test_a_guard_draws_from_the_seed_of_its_run_or_from_its_own(name: str) -> None:
    drawing: Any = parse_guards((name, f"{name}:seed=3"), 5)
    assert [one.seed for one in drawing] == [5, 3]


def test_a_fault_draws_from_the_seed_of_its_run_or_from_its_own() -> None:
    plan = FaultPlan(parse_faults("masters:rank=0,masters:rank=1:seed=3")).drawn_from(5)
    assert [fault.seed for fault in plan.faults] == [5, 3]


def test_repeats_of_a_comparison_do_not_share_one_coin() -> None:
    arm = parse_arm("local:rate=0.5:plan=bernoulli")
    comparison = CompareConfig(task=Tiny(), strategies=(arm.text,), seed=4)
    coins: list[Any] = [strategy_of(arm, _run_of(arm, comparison, repeat), None) for repeat in range(3)]
    assert [coin.seed for coin in coins] == [4, 5, 6]
