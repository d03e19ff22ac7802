"""What the experiments on echo reckon with: modelled time, target losses, tuning, intervals."""

import importlib
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from stretto import DDP, Bernoulli, EchoLoader, EchoOptions, Even, LocalSGD
from stretto.strategies import Strategy
from stretto_lab.virtual import VirtualCluster, VirtualGroup, VirtualStore

SCRIPTS = Path(__file__).parents[2] / "experiments"
STEP = 1.0


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module(name)


@pytest.fixture
def echoed_run(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("echoed_run", monkeypatch)


def ends(script: ModuleType, fresh: str, load: float, exposed: float = 0.0) -> list[float]:
    model = script.Model(step_seconds=STEP, load_seconds=load)
    return script.timeline([letter == "1" for letter in fresh], [True] * len(fresh), model, exposed)


TIMES: list[tuple[str, float, float, list[float]]] = [
    ("1111", 0.5, 0.0, [1.5, 2.5, 3.5, 4.5]),  # only the first batch is waited for
    ("1111", 3.0, 0.0, [4.0, 7.0, 10.0, 13.0]),
    # While the first batch is used ten times two more are read, so the fourth has to be waited for.
    ("1000000000111", 3.0, 0.0, [14.0, 15.0, 17.0]),
    ("1000", 1.0, 0.25, [2.25, 3.5, 4.75, 6.0]),  # exchanges hide behind nothing
]


def test_a_step_ends_when_its_batch_has_come_and_the_exchange_is_over(echoed_run: ModuleType) -> None:
    for fresh, load, exposed, last in TIMES:
        assert ends(echoed_run, fresh, load, exposed)[-len(last) :] == last


@pytest.mark.parametrize("ratio", [0.5, 2.0, 5.0])
def test_modelled_time_is_that_of_the_library_in_virtual_time(echoed_run: ModuleType, ratio: float) -> None:
    def program(rank: int, group: VirtualGroup) -> tuple[str, list[float]]:
        store = VirtualStore(iter(range(40)), group, itertools.repeat(ratio * STEP))
        loader = EchoLoader(store, Bernoulli(0.4), options=EchoOptions(ahead=echoed_run.AHEAD))
        fresh, times = "", []
        for _ in loader:
            group.charge_ns(round(STEP * 1e9))
            fresh += "1" if loader.is_fresh else "0"
            times.append(group.now_ns / 1e9)
        return fresh, times

    fresh, times = VirtualCluster(1).run(program).values[0]
    assert fresh.count("1") == 40
    assert ends(echoed_run, fresh, load=ratio * STEP) == pytest.approx(times)


@pytest.mark.parametrize(("strategy", "share"), [(DDP(), 2 / 3), (LocalSGD(rate=0.5), 0.0)])
def test_only_gradients_hide_behind_the_backward_pass(
    echoed_run: ModuleType, strategy: Strategy, share: float
) -> None:
    arm = echoed_run.Arm(plan=Even(1), loads=2, strategy=strategy)
    # At 1e8 bits per second these bytes take one second, which is one step.
    run = {"micro_batches": 1, "fresh": "11", "exchanged": "11", "exchange_bytes": 12_500_000}
    end = echoed_run.costs(run, arm, echoed_run.Model(step_seconds=STEP, load_seconds=0.0), batch=4)[-1]
    assert end["slow_link_seconds"] == pytest.approx(4.0)
    assert end["hidden_seconds"] == pytest.approx(4.0 - 2 * share)
    assert end["updates"] == 2
    assert end["fresh_samples"] == 2 * 4 * echoed_run.RANKS
    assert end["megabytes"] == 25.0


def curve(*losses: float) -> dict[str, Any]:
    return {"curve": [{"use": 10 * (i + 1), "heldout_loss": loss} for i, loss in enumerate(losses)]}


@pytest.mark.parametrize(
    ("losses", "use"), [((2.0, 1.0), 15), ((1.5, 1.0), 10), ((2.0, 1.6, 1.4), 25), ((2.0, 1.6), None)]
)
def test_a_target_is_reached_where_the_line_between_evaluations_crosses_it(
    monkeypatch: pytest.MonkeyPatch, losses: tuple[float, ...], use: int | None
) -> None:
    path = [{"use": float(number)} for number in range(1, 31)]
    found = script("paired_comparison", monkeypatch).reached(curve(*losses), path, target=1.5)
    assert found == (None if use is None else {"use": use})
