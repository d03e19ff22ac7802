"""Ranks that are not equally fast, and clocks: a plan says what a simulation takes, and how much the batch grows."""

import dataclasses
import random
import statistics
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from stretto.engine import Clock
from stretto.errors import ConfigError
from stretto.groups import Link
from stretto_lab.cli import main
from stretto_lab.cli.screens import recommendation
from stretto_lab.estimate import Work, time_of
from stretto_lab.observe import read_json_lines
from stretto_lab.plan import PlanConfig, Ranking, rank_by_time
from stretto_lab.plan.measure import by_speed
from stretto_lab.plan.twin import Twin
from stretto_lab.recipes import DigitsResNet, MicroBatches, Task
from stretto_lab.train.arms import parse_arm
from stretto_lab.train.simulation import SimulateConfig, simulate
from tests.draws import part, seeds
from tests.plan.machine import BUCKET_BYTES, MACHINE, machine_of, priced, seconds
from tests.terminal import print_on_a_terminal
from tests.train.tiny import Plane, quadrant_loss

SAMPLES = 8
"""Of a micro-batch."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Wide:
    """A task without buffers, large enough that what is said about a round weighs little beside its gradients."""

    width: int = 20_000
    """Hidden values."""

    @property
    def parameters(self) -> int:
        return 7 * self.width + 4

    def build(self, rank: int, world_size: int, seed: int, updates: int | None) -> Task:
        """See `TaskConfig.build`."""
        model = nn.Sequential(nn.Linear(2, self.width), nn.Tanh(), nn.Linear(self.width, 4))
        return Task(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            scheduler=None,
            loader=MicroBatches(Plane(512, seed=0), SAMPLES, rank=rank, world_size=world_size, seed=seed),
            loss=quadrant_loss,
            evaluate=lambda model: 0.0,
        )


STEADY = (
    "zero1",
    "ddp",
    "acco",
    "wp",
    "dpu",
    "local:rate=0.25",
    "average:4",
    "diloco:interval=4:fragments=2",
)
BY_THE_CLOCK = ("acco", "wp", "dpu")
WARM_UP, UPDATES = 4, 16
"""First updates, in which overlapping only begins, are a whole interval of what sends now and then."""


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("seed", seeds(24))
def test_price_and_estimate_are_within_a_tenth_of_what_a_simulation_takes_on_random_machines(
    seed: int,
) -> None:
    """A tenth: ranks within a twentieth are one class, a class is as fast as its mean, and updates by the clock are
    whole micro-batches. An estimate knows of equal ranks and fixed counts alone."""
    draw, task = random.Random(seed), Wide()
    ranks, micro_batches, micro_batch_ms = draw.choice([2, 3, 4, 6]), draw.choice([2, 4]), draw.uniform(1, 30)
    is_even = draw.random() < 0.5
    slow = {} if is_even else {rank: draw.uniform(1, 5) for rank in draw.sample(range(ranks), ranks // 2)}
    arm = STEADY[seed % len(STEADY)]
    if not is_even and arm in BY_THE_CLOCK:
        arm += draw.choice(["", f":clock={(least := draw.choice([1, 2]))},{least + draw.choice([2, 8, 16])}"])
    arm += draw.choice(["", ":wire=bf16", ":wire=int4"])
    bucket_bytes = draw.choice([1, 4, 8]) * task.parameters // 2
    # An exact exchange takes from a quarter to sixteen times an update's computing.
    bits = 64 * task.parameters * 1000 / (micro_batches * micro_batch_ms * 2 ** draw.uniform(-2, 4))
    microseconds = 0 if is_even else round(10 ** draw.uniform(1, 3))
    simulate(
        SimulateConfig(
            task=task,
            ranks=ranks,
            slow=slow,
            micro_batch_ms=micro_batch_ms,
            micro_batches=micro_batches,
            network=f"{bits / 1e3:.3f}kbit,{microseconds}us",
            strategy=arm,
            bucket_bytes=bucket_bytes,
            updates=WARM_UP + UPDATES,
            run_dir="run",
        )
    )
    records = read_json_lines(Path("run") / "updates.jsonl")
    ends = [record["training_seconds"] for record in records]
    taken = (ends[-1] - ends[WARM_UP - 1]) / UPDATES
    counts = [
        sum(count * alike for count, alike in record["micro_batches"]) / ranks for record in records[WARM_UP:]
    ]
    link = Link(bits_per_second=bits, latency_seconds=microseconds / 1e6)
    machine = machine_of(ranks, micro_batch_ms, link, slow, task.parameters)
    found = priced(arm, machine, micro_batches, bucket_bytes)
    assert found.seconds_per_micro_batch == pytest.approx(taken / statistics.mean(counts), rel=0.1)
    assert found.micro_batches == pytest.approx(statistics.mean(counts), rel=0.15)
    if is_even and arm.partition(":")[0] != "ddp":  # of which an estimate knows only bounds
        of_arm = parse_arm(arm)
        seconds_of = micro_batches * micro_batch_ms / 1000
        work = Work(
            parameters=task.parameters,
            update_seconds=seconds_of,
            ranks=ranks,
            micro_batches=micro_batches,
            link=link,
            bucket_bytes=bucket_bytes,
        )
        assert time_of(work, of_arm.strategy(), of_arm.wire or "fp32").seconds == pytest.approx(
            taken, rel=0.1
        )


def test_fixed_counts_are_as_slow_as_the_slowest_rank_however_many_are_fast() -> None:
    alone = dataclasses.replace(MACHINE, link=Link())
    draw = random.Random(0)
    for ranks in part((500, 64, 5, 2)):
        factors = {rank: draw.uniform(1, 4) for rank in range(ranks)}
        slowest = dict.fromkeys(range(ranks), max(factors.values()))
        found, expected = (seconds("zero1", alone.with_ranks(ranks, slow)) for slow in (factors, slowest))
        assert found == pytest.approx(expected, rel=1e-3)


def test_a_twin_stands_for_all_ranks_and_for_all_that_they_compute_by_the_clock() -> None:
    draw = random.Random(0)
    for _ in range(200):
        ranks = draw.randint(1, 100)
        spread = draw.choice([1.0, 1.04, 1.5, 6.0])
        factors = {rank: draw.uniform(1, spread) for rank in range(ranks)}
        twin = Twin.of(MACHINE.with_ranks(ranks, factors), BUCKET_BYTES, by_node=False)
        assert twin.ranks == len(twin.slowness) <= 5
        assert sum(twin.stands_for) == pytest.approx(ranks)
        assert max(twin.slowness) == max(factors.values())
        rate = sum(map(lambda slow, count: count / slow, twin.slowness, twin.stands_for))
        assert rate == pytest.approx(sum(1 / factor for factor in factors.values()), rel=0.05)


def heterogeneous(wire: str, **others: Any) -> Ranking:
    """Four ranks, the last three times as slow, on 10 Mbit/s: an exchange of this model takes ten micro-batches."""
    machine = machine_of(4, 10, Link(bits_per_second=1e7), {3: 3.0}, 21_000)
    return rank_by_time(machine, micro_batches=4, bucket_bytes=2**22, wire=wire, **others)


@pytest.mark.long
def test_where_one_rank_is_three_times_as_slow_acco_by_the_clock_is_recommended_and_its_batch_told() -> None:
    ranking = heterogeneous("fp32")
    choice = ranking.choice
    assert choice.arm == "acco:clock=1,16"
    by_the_clock = ranking.base.seconds_per_micro_batch / choice.seconds_per_micro_batch
    assert by_the_clock > 1
    text = " ".join(recommendation(ranking).split())
    assert "use --strategy acco --clock 1,16:" in text
    assert f"{by_the_clock:.2f} times as fast per sample as zero1 on fp32" in text
    assert f"so {choice.micro_batches / 4:.1f} times fewer updates for as many samples" in text


@pytest.mark.long
def test_a_clock_is_looked_at_where_ranks_are_unequal_or_the_job_has_one() -> None:
    def clocks(ranking: Ranking) -> set[Any]:
        return {
            parse_arm(one.arm).settings.get("clock") for one in ranking.prices if parse_arm(one.arm).overlaps
        }

    own = Clock(minimum=2, maximum=9)
    assert clocks(heterogeneous("int4")) == {None, Clock(minimum=1, maximum=16)}
    assert clocks(heterogeneous("int4", clock=None)) == {None}
    assert clocks(heterogeneous("int4", clock=own)) == {own}
    even = MACHINE.with_ranks(4, {3: 1.4})
    assert clocks(rank_by_time(even, micro_batches=4, bucket_bytes=BUCKET_BYTES, wire="int4")) == {None}


def test_what_overlaps_takes_its_time_from_computing_by_the_clock_too() -> None:
    """On a core of its own a rank computes while its lane is not at work, so both together never rest."""
    for cores, busy in ((8, 0.0), (1, 1.0)):
        machine = dataclasses.replace(MACHINE, cores=cores, link=Link(bits_per_second=3e7))
        found = priced("dpu:clock=1,64", machine)
        lane = 0.01 + 0.02 / 2
        computing = found.micro_batches * machine.micro_batch_seconds + busy * lane
        assert found.seconds - found.exposed_seconds == pytest.approx(computing, rel=0.02)


def test_the_loader_is_as_slow_for_a_fast_rank_as_for_a_slow_one() -> None:
    machine = dataclasses.replace(MACHINE, link=Link(), load_seconds=4 * MACHINE.micro_batch_seconds)
    even, uneven = (seconds("zero1", machine.with_ranks(2, slow)) for slow in ({}, {1: 3.0}))
    assert uneven == pytest.approx(even, rel=0.01)


def test_a_neighbour_that_disturbs_some_micro_batches_makes_no_rank_slow() -> None:
    """On shared cores most of a rank's micro-batches may be disturbed; one that is not tells its speed."""
    draw = numpy.random.default_rng(0)
    for _ in range(100):
        ranks = draw.integers(2, 9)
        factors = draw.choice([1.0, 1.3, 3.0], size=ranks)
        disturbed = 1 + draw.exponential(2.0, size=(ranks, 8))
        disturbed[range(ranks), draw.integers(0, 8, size=ranks)] = 1.0
        taken = torch.tensor(factors[:, None] * disturbed)
        slowness, longest = by_speed(taken.amin(1), taken.median(1, keepdim=True).values)
        torch.testing.assert_close(slowness, torch.tensor(factors / factors.min()))
        # With fixed counts no rank is priced as faster than it was.
        assert (longest * slowness >= taken.median(1).values * (1 - 1e-12)).all()


def test_slow_ranks_are_those_of_the_plan_and_ranks_that_were_not_measured_are_as_slow_as_the_slowest() -> (
    None
):
    measured = dataclasses.replace(MACHINE, slowness=(1.0, 1.2))
    here = PlanConfig(task=DigitsResNet(), slow={1: 2.0}).machines(measured)
    assert [one.slowness for one in here] == [(1.0, 2.4)]
    there = PlanConfig(task=DigitsResNet(), ranks=(3,), slow={2: 2.0}).machines(measured)
    assert [one.slowness for one in there] == [(1.2, 1.2, 2.4)]
    with pytest.raises(ConfigError, match="slow names rank 3; the plan is for ranks 0 to 2"):
        PlanConfig(task=DigitsResNet(), ranks=(3,), slow={3: 2.0}).machines(measured)


@pytest.mark.long
def test_the_command_takes_slow_ranks_that_are_not_here(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_on_a_terminal(monkeypatch)
    words = "plan digits-resnet --batches 2 --ranks 4 --slow 3=4 --network 10mbit --wire bf16 --clock 1,6"
    assert main(words.split()) == 0
    lines = capfd.readouterr().out.splitlines()
    assert any(line.startswith("4 ranks: use --strategy acco --wire bf16 --clock 1,6:") for line in lines)
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("acco:clock=1,6 bf16 (x") for line in lines)
