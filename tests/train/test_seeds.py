"""`--seed` decides every draw of a run, unless the option that draws has a seed of its own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stretto.fields import field_types
from stretto.guards import GUARDS
from stretto.guards.text import parse_guards
from stretto.strategies import STRATEGIES
from stretto_lab.faults import Fault, FaultPlan, parse_faults
from stretto_lab.observe import read_json_lines
from stretto_lab.train.arms import parse_arm
from stretto_lab.train.comparison import _run_of
from stretto_lab.train.configuration import CompareConfig, RunConfig
from stretto_lab.train.handle import strategy_of
from stretto_lab.train.simulation import SimulateConfig, simulate
from tests.draws import part
from tests.train.tiny import Tiny


def drawn(folder: str, field: str, seed: int, **settings: Any) -> list[Any]:
    """Return what a run has drawn: a field of its updates, or the steps at which faults have struck."""
    simulate(
        SimulateConfig(
            task=Tiny(), ranks=2, network="free", updates=24, run_dir=folder, seed=seed, **settings
        )
    )
    file = "strikes/rank-1.jsonl" if field == "step" else "updates.jsonl"
    return [record[field] for record in read_json_lines(Path(folder, file))]


FAULT = parse_faults("contribution:rank=1:lasts=sticky:rate=0.3:bits=1")
DRAWS: dict[str, tuple[str, dict[str, Any]]] = {
    "averages": ("gap", {"strategy": "local:rate=0.5:plan=bernoulli"}),
    "averages with the echo": (
        "gap",
        {"strategy": "local:rate=0.5:plan=bernoulli", "echo": "bernoulli:p=0.5"},
    ),
    "echoes": ("uses", {"echo": "bernoulli:p=0.5"}),
    "parameters, order of the data, dropout": ("loss", {}),
    "faults": ("step", {"faults": FAULT, "micro_batches": 1}),
}


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("what", part(DRAWS))
def test_another_seed_draws_otherwise_and_the_same_one_alike(what: str) -> None:
    field, settings = DRAWS[what]
    first, again, other = (
        drawn(str(number), field, seed, **settings) for number, seed in enumerate((0, 0, 5))
    )
    assert first == again != other


RUN = RunConfig(task=Tiny(), seed=5)
SEEDED: dict[str, tuple[Any, Callable[[str], Any]]] = {
    "strategy": (STRATEGIES, lambda text: strategy_of(parse_arm(text), RUN, None)),
    "guard": (GUARDS, lambda text: parse_guards((text,), RUN.seed)[0]),
    "fault": (
        {"masters:rank=0": Fault},
        lambda text: FaultPlan(parse_faults(text)).drawn_from(RUN.seed).faults[0],
    ),
}
DRAWING = [
    (kind, name)
    for kind, (known, _) in SEEDED.items()
    for name in known
    if "seed" in field_types(known[name])
]


def test_what_draws_does_it_from_the_seed_of_its_run_or_from_its_own() -> None:
    for kind, name in DRAWING:
        _, made = SEEDED[kind]
        assert [made(text).seed for text in (name, f"{name}:seed=3")] == [5, 3], name


def test_repeats_of_a_comparison_do_not_share_one_coin() -> None:
    arm = parse_arm("local:rate=0.5:plan=bernoulli")
    comparison = CompareConfig(task=Tiny(), strategies=(arm.text,), seed=4)
    coins: list[Any] = [strategy_of(arm, _run_of(arm, comparison, repeat), None) for repeat in range(3)]
    assert [coin.seed for coin in coins] == [4, 5, 6]
