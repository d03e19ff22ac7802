"""What follows from measured times, and that a diagnosis measures what it says."""

from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader

from stretto import EchoLoader, Even, Ready, diagnose, errors
from stretto.cli import main
from stretto.echo import Diagnosis
from tests.echo.sources import Squares


def diagnosis(load: float, step: float, period: float, variation: float = 0.0) -> Diagnosis:
    return Diagnosis(
        load_seconds=load,
        load_variation=variation,
        step_seconds=step,
        exposed_seconds=0.0,
        period_seconds=period,
        advice=("raise num_workers from 1 towards the 8 cores",),
    )


def test_a_slow_loader_is_named_with_its_free_uses_and_the_most_an_echo_gains() -> None:
    found = diagnosis(0.050, 0.020, 0.050)
    assert found.plan == Even(2.5)
    assert found.summary.startswith(
        "input-bound: a batch takes 50 ms to load and 20 ms to train on; first raise num_workers from 1"
    )
    assert "2.50 uses are free" in found.summary
    assert "at most 2.5 times" in found.summary


def test_an_irregular_loader_is_met_with_the_reactive_plan() -> None:
    assert diagnosis(0.050, 0.020, 0.060, variation=0.5).plan == Ready(max_uses=4)


def test_however_slow_the_loader_no_more_than_four_uses_are_recommended() -> None:
    found = diagnosis(1.0, 0.020, 1.0)
    assert found.plan == Even(4.0)
    assert "at most 4.0 times" in found.summary


@pytest.mark.parametrize("load", [0.001, 0.020, 0.0215])
def test_no_echo_is_recommended_where_it_cannot_help(load: float) -> None:
    found = diagnosis(load, 0.020, 0.021)
    assert found.plan is None
    assert found.summary.startswith("not input-bound: ")
    assert found.summary.endswith("an echo cannot help")


def test_loading_that_is_not_overlapped_is_told_apart() -> None:
    found = diagnosis(0.015, 0.020, 0.035)
    assert found.plan is None
    assert "take turns" in found.summary
    assert "at most 1.8 times" in found.summary


def test_the_loader_is_read_alone_and_the_step_runs_on_one_batch() -> None:
    events: list[str] = []

    class Told:
        def __iter__(self) -> Iterator[int]:
            for number in range(5):
                events.append("load")
                yield number

    def step(batch: int) -> None:
        events.append(f"step {batch}")

    found = diagnose(EchoLoader(Told(), Even(3)), step, batches=6, skip=2)
    cached, loads, steps, both = events[:1], events[1:9], events[9:17], events[17:]
    assert cached == loads[:1]
    assert loads == ["load"] * 8
    assert steps == ["step 0"] * 8
    assert both == [event for number in (4, 0, 1, 2, 3, 4, 0, 1) for event in ("load", f"step {number}")]
    assert min(found.load_seconds, found.step_seconds, found.period_seconds) > 0


@pytest.mark.parametrize("data", [[], iter([1, 2])], ids=["empty", "generator"])
def test_a_loader_that_does_not_begin_again_is_named(data: Any) -> None:
    with pytest.raises(errors.ConfigError, match="begins again"):
        diagnose(data, lambda batch: None, batches=4, skip=0)


def test_cheaper_remedies_come_first() -> None:
    found = diagnose(DataLoader(Squares(8), batch_size=4), lambda batch: None, batches=2, skip=0)
    assert found.advice[0].startswith("load beside the training: num_workers=1")


def test_the_command_tells_a_slow_loader_from_a_fast_one(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["diagnose", "digits-resnet", "--task.width", "4", "--task.batch", "8", "--workers", "1"]
    # A step of this model takes a few milliseconds, and nowhere a fifth of a second.
    assert main([*words, "--batches", "1", "--slow-loader", "200", "--strategy", "zero1"]) == 0
    shown = capsys.readouterr().out
    assert "L, the loader alone" in shown
    assert "\ninput-bound: " in shown
    assert "Even(uses=4.0)" in shown
    assert main([*words, "--batches", "6", "--strategy", "zero1"]) == 0
    assert "not input-bound" in capsys.readouterr().out
