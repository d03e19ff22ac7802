"""What follows from measured times, and that a diagnosis measures what it says."""

import itertools
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader

from stretto import EchoLoader, Even, Ready, diagnose, errors
from stretto.echo import Diagnosis, Plan
from stretto.echo.text import parse_plan, plan_text
from stretto.records import Update
from stretto_lab.cli import main
from tests.draws import seeds
from tests.echo.sources import Squares
from tests.observe.updates import update


def diagnosis(load: float, step: float, period: float, variation: float = 0.0) -> Diagnosis:
    return Diagnosis(
        load_seconds=load,
        load_variation=variation,
        step_seconds=step,
        exposed_seconds=0.0,
        period_seconds=period,
        advice=("raise num_workers from 1 towards the 8 cores",),
    )


@pytest.mark.parametrize(
    ("found", "plan", "words"),
    [
        (
            diagnosis(0.050, 0.020, 0.050),
            Even(2.5),
            (
                "Loading is the bottleneck: a batch takes 50 ms to load and 20 ms to train on. First raise num_workers",
                "a batch can be used 2.50 times",
                "Training reaches a loss at most 2.5 times sooner",
            ),
        ),
        (diagnosis(0.050, 0.020, 0.060, variation=0.5), Ready(max_uses=4), ()),
        (diagnosis(1.0, 0.020, 1.0), Even(4.0), ("at most 4.0 times",)),
        *(
            (diagnosis(load, 0.020, 0.021), None, ("Loading is not the bottleneck", "again cannot help."))
            for load in (0.001, 0.020, 0.0215)
        ),
        (diagnosis(0.015, 0.020, 0.035), None, ("alternate:", "at most 1.8 times")),
    ],
)
def test_times_lead_to_a_plan_and_to_words(
    found: Diagnosis, plan: Plan | None, words: tuple[str, ...]
) -> None:
    assert found.plan == plan
    assert [text for text in words if text not in found.summary] == []


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
    assert found.advice[0].startswith("load while training runs: num_workers=1")


@pytest.mark.parametrize("seed", seeds(60))
def test_times_are_those_of_the_clock_and_advice_follows_from_the_verdict(seed: int) -> None:
    """Times are drawn over six orders of magnitude."""
    draw = random.Random(seed)
    load, step = (10 ** draw.uniform(-5, 1) for _ in range(2))
    job = Counted(load, step)
    if draw.random() < 0.3:  # the loop is disturbed, or reads ahead
        job.together = draw.uniform(0.2, 1.0)
    found = diagnose(job, job.train, batches=6, now=job.now)
    # Sums of fewer than 100 terms below 10: their rounding is far below 1e-9.
    assert (found.load_seconds, found.step_seconds) == pytest.approx((load, step), rel=1e-9)
    assert found.period_seconds == pytest.approx(job.together * (load + step), rel=1e-9)
    assert found.free_uses == pytest.approx(load / step, rel=1e-9)
    helps = found.is_input_bound or found.waits
    assert bool(found.advice) == helps
    assert ("First " in found.summary) == helps
    assert (found.plan is not None) == found.is_input_bound == ("use batches again with" in found.summary)
    assert ("cannot help" in found.summary) == (found.plan is None)
    assert ("disturbed" in found.summary) == (found.period_seconds < max(load, step) / 1.1)
    if found.plan is not None:
        assert parse_plan(plan_text(found.plan)) == found.plan


def test_the_spread_of_steps_is_that_between_updates() -> None:
    """Two micro-batches of 1 s and 3 s make every update: updates do not differ."""
    clock, lengths = [0.0], itertools.cycle([1.0, 3.0])

    def step(batch: int) -> Update | None:
        clock[0] += next(lengths)
        return update(1) if clock[0] % 4 == 0 else None

    found = diagnose([1, 2], step, batches=6, skip=2, now=lambda: clock[0])
    assert found.step_seconds == 2.0
    assert found.step_variation == found.period_variation == 0.0


class Counted:
    """Loads and steps that take the time they are said to, on a clock of their own."""

    def __init__(self, load: float, step: float) -> None:
        self.load, self.step = load, step
        self.together = 1.0
        self.seconds = 0.0
        self._steps = 0

    def __iter__(self) -> Iterator[int]:
        for number in range(7):
            self.seconds += self.load
            yield number

    def train(self, batch: int) -> None:
        self._steps += 1
        self.seconds += (
            self.step if self._steps <= 10 else self.together * self.step - (1 - self.together) * self.load
        )

    def now(self) -> float:
        return self.seconds


def test_the_command_shows_what_it_has_measured(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["diagnose", "digits-resnet", "--task.width", "4", "--task.batch", "8", "--workers", "1"]
    assert main([*words, "--batches", "1", "--slow-loader", "20", "--strategy", "zero1"]) == 0
    shown = capsys.readouterr().out
    load, step, period = (
        float(number) for number in re.findall(r" ([\d.]+) ms \+- \d+%$", shown, re.MULTILINE)
    )
    # How busy the machine is decides about the step; but a read sleeps no less than it is told to.
    assert load >= 20
    assert period >= 20
    if abs(load / step - 1.1) > 0.01:
        assert ("Loading is the bottleneck" in shown) == ("--echo " in shown) == (load / step > 1.1)
