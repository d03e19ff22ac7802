"""A run whose strategy is chosen for it goes on with another one, once its updates take another time."""

import dataclasses
import json
import random
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.groups import Link
from stretto_lab.cli import commands, main
from stretto_lab.observe import read_json_lines
from stretto_lab.plan import Machine
from stretto_lab.plan.measure import WIRES
from stretto_lab.train.configuration import RunConfig
from stretto_lab.train.loop import Pace
from stretto_lab.train.outcome import Outcome
from stretto_lab.train.rank import RankContext, train_at
from stretto_lab.virtual import Compute, VirtualCluster, VirtualGroup
from tests.train.tiny import Tiny

TINY = f"{Path(__file__).parents[1] / 'train' / 'tiny.py'}:Tiny"
WORKERS = 2
MICRO_BATCH_SECONDS = 0.1
FAST = Machine(
    ranks=WORKERS,
    parameters=2_000_000,
    forward_seconds=0.05,
    backward_seconds=0.05,
    load_seconds=0.0,
    step_seconds=0.001,
    exchange_seconds=dict.fromkeys(WIRES, 0.001),
    link=Link(),
    cores=8,
)
SLOW = dataclasses.replace(FAST, link=Link(bits_per_second=1e8))


class VirtualRanks:
    """Ranks in virtual time, on a machine whose clock runs faster from an instant on: all takes as much longer.

    Args:
        instant: Virtual seconds from the beginning of the first run.
        factor: On all that happens behind it.
    """

    world_size = local_world_size = WORKERS
    is_first = True

    def __init__(self, instant: float, factor: float) -> None:
        self._instant, self._factor = instant, factor
        self._machines = [FAST, SLOW]
        self.runs: list[RunConfig[Tiny]] = []
        self.outcomes: list[list[Outcome]] = []

    def without(self, ranks: Collection[int]) -> None:
        """Start no other ranks."""

    def call(self, function: Callable[..., Any], config: Any, *args: Any) -> list[Any]:
        """Measure, or train."""
        if function.__name__ == "measure":
            return [self._machines.pop(0)] * WORKERS
        first = not self.runs
        self.runs.append(config)

        def program(rank: int, group: VirtualGroup) -> Outcome:
            def now() -> float:
                seconds = group.now_ns / 1e9
                behind = max(0.0, seconds - self._instant) if first else seconds
                return seconds + (self._factor - 1) * behind

            context = RankContext(
                rank=rank, world_size=WORKERS, device=torch.device("cpu"), group=group, now=now
            )
            return train_at(context, config, args[0])

        compute = Compute(micro_batch_ns=round(1e9 * MICRO_BATCH_SECONDS))
        self.outcomes.append(list(VirtualCluster(WORKERS, compute=compute).run(program).values))
        return self.outcomes[-1]


@pytest.fixture
def slowing(monkeypatch: pytest.MonkeyPatch) -> VirtualRanks:
    """Ranks of a command, whose updates of 0.4 s take 2 s from the thirtieth on."""
    ranks = VirtualRanks(instant=12.0, factor=5.0)
    monkeypatch.setattr(commands, "find_ranks", lambda workers, device: ranks)
    return ranks


def options() -> list[str]:
    return json.loads(Path("run", "config.json").read_text())["command"]["options"]


def chosen() -> list[str]:
    words = options()
    return [words[index + 1] for index, word in enumerate(words) if word == "--strategy"]


def test_a_run_that_slows_down_is_measured_again_and_goes_on_with_the_new_choice(
    slowing: VirtualRanks, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--updates", "80", "--no-tensorboard", "--run-dir", "run"]
    assert main(["train", TINY, "--strategy", "auto", *words]) == 0
    shown = capfd.readouterr().out
    assert "an update takes 2 s, 0.4 s at first: choosing again" in shown
    first, second = slowing.outcomes
    assert len({outcome.pace for outcome in first}) == 1
    assert first[0].pace == pytest.approx((0.4, 2.0))
    assert 30 < first[0].updates < 70
    assert [(outcome.updates, outcome.pace) for outcome in second] == [(80, None)] * WORKERS
    assert [row["step"] for row in read_json_lines(Path("run", "updates.jsonl"))] == list(range(1, 81))
    auto, before, behind = chosen()
    assert auto == "auto"
    assert before == slowing.runs[0].strategy == "zero1"  # nothing is to be gained on a free link
    assert behind != before
    assert shown.count("is in   run") == 1


def test_a_resumed_run_goes_on_being_watched_until_its_user_chooses(slowing: VirtualRanks) -> None:
    words = ["--updates", "4", "--no-tensorboard", "--run-dir", "run", "--replan", "2"]
    assert main(["train", TINY, "--strategy", "auto", *words]) == 0
    assert main(["resume", "run", "--updates", "6"]) == 0
    assert main(["resume", "run", "--updates", "8", "--strategy", "ddp"]) == 0
    assert main(["resume", "run", "--updates", "10"]) == 0
    assert [(run.strategy, run.replan) for run in slowing.runs] == [
        ("zero1", 2.0),
        ("zero1", 2.0),
        ("ddp", None),
        ("ddp", None),
    ]
    assert main(["resume", "run", "--updates", "12", "--replan", "3"]) == 2
    assert main(["resume", "run", "--updates", "12", "--strategy", "auto", "--replan", "3"]) == 0
    assert (slowing.runs[-1].strategy, slowing.runs[-1].replan) == (chosen()[-1], 3.0)
    assert chosen()[-1] != "ddp"


def test_replan_is_refused_where_nothing_is_chosen_or_the_factor_is_none(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", TINY, "--replan", "2"]) == 2
    assert main(["train", TINY, "--allow-loss", "0.1"]) == 2
    assert main(["train", TINY, "--strategy", "auto", "--replan", "1"]) == 2
    first, allowed, second = capfd.readouterr().err.splitlines()
    assert "expected --strategy auto" in first
    assert "--allow-loss says what a choice may cost: expected --strategy auto" in allowed
    assert "must be above 1, found 1" in second


def paces(seconds: list[float], factor: float = 1.5) -> tuple[float, float] | None:
    pace, now = Pace(factor), 0.0
    for one in seconds:
        now += one
        pace.arrived(now)
    return pace.change


def test_a_pace_changes_where_most_updates_of_a_stretch_take_another_time_and_not_for_a_few() -> None:
    draws = random.Random(0)
    for _ in range(200):
        typical = 10 ** draws.uniform(-1, 1)
        count = max(Pace.UPDATES, int(Pace.SECONDS / typical) + 1)  # of a stretch, at most
        steady = [typical * draws.uniform(0.9, 1.1) for _ in range(6 * count)]
        stalled = [one * (50 if draws.random() < 0.05 else 1) for one in steady]
        assert paces(steady) is None
        assert paces(stalled) is None
        factor = draws.choice([0.3, 0.5, 2.0, 4.0])
        found = paces([*steady, *[factor * one for one in steady], *[factor * one for one in steady] * 3])
        assert found is not None
        assert found == pytest.approx((typical, factor * typical), rel=0.1)
