"""Times of a job on a device that does later what its host calls."""

import math
import random

import pytest
import torch
from torch import nn

import stretto as st
from stretto.strategies.ledger import ledger_of
from tests.draws import part
from tests.engine.late_device import LateDevice, OnLateDevice

STRATEGIES = {"acco": st.ACCO(), "wp": st.WeightPrediction(), "dpu": st.DPU(), "zero1": st.ZeRO1()}
MICRO_BATCHES = 3
"""Of a round."""


class Job:
    """A job whose micro-batches and exchanges take as long as a test says."""

    def __init__(self, strategy: st.Strategy, clock: st.Clock | None = None) -> None:
        torch.manual_seed(0)
        self.device = LateDevice()
        self.group = OnLateDevice(self.device)
        self.model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        micro_batches = clock or MICRO_BATCHES * ledger_of(strategy).rounds
        self.parallel = st.DataParallel(
            self.model, optimizer, strategy, micro_batches=micro_batches, group=self.group
        )

    def micro_batch(self, launch: float, compute: float, lane: float) -> st.Update | None:
        """Run one: the host takes `launch`, the device `compute`, and a round that takes off in it `lane`."""
        self.group.next_seconds = lane
        loss = self.model(torch.ones(1, 4)).sum()  # takes off, if a round is ready
        self.device.host += launch
        self.device.call(compute)
        return self.parallel.backward(loss)


def costs(seed: int, count: int) -> list[tuple[float, float, float]]:
    """Seconds of launch, compute and lane: hosts far ahead and hosts that are the slower part, lanes of any length."""
    draws = random.Random(seed)
    launch, lane = draws.choice([0.0, 0.1, 1.0]), draws.choice([0.1, 1.0, 3.0])
    return [
        (launch * draws.random(), draws.random(), lane * MICRO_BATCHES * draws.random()) for _ in range(count)
    ]


@pytest.mark.long
def test_each_second_of_an_overlapping_lane_that_the_device_waited_for_is_exposed_and_no_other() -> None:
    for seed in range(40):
        name = random.Random(seed).choice(["acco", "wp", "dpu"])
        job, exposed, lanes, truth = Job(STRATEGIES[name]), 0.0, 0.0, Truth()
        for index, (launch, compute, lane) in enumerate(costs(seed, 20 * MICRO_BATCHES)):
            update = job.micro_batch(launch, compute, lane)
            truth.micro_batch(index, launch, compute, lane)
            exposed += 0.0 if update is None else update.exposed_seconds
            lanes += 0.0 if update is None else update.lane_seconds
        job.device.host = truth.host = 1e4  # the device has done it all; what follows takes nothing
        for _ in range(4 * MICRO_BATCHES):
            update = job.micro_batch(0.0, 0.0, 0.0)
            exposed += 0.0 if update is None else update.exposed_seconds
            lanes += 0.0 if update is None else update.lane_seconds
        assert exposed == pytest.approx(truth.exposed, abs=1e-6), (name, seed)
        assert lanes == pytest.approx(truth.lanes, abs=1e-6), (name, seed)
        job.parallel.finish()


class Truth:
    """The same schedule in numbers alone: when the host, the computing and the lane have done what is theirs."""

    def __init__(self) -> None:
        self.host = self.computed = self.exchanged = self.exposed = self.lanes = 0.0

    def micro_batch(self, index: int, launch: float, compute: float, lane: float) -> None:
        if index % MICRO_BATCHES == 0 and index > 0:  # take-off
            self.exchanged = max(self.exchanged, self.computed, self.host) + lane
            self.lanes += lane
        self.host += launch
        self.computed = max(self.computed, self.host) + compute
        if index % MICRO_BATCHES == MICRO_BATCHES - 1:  # landing of the round before
            self.exposed += max(0.0, self.exchanged - self.computed)
            self.computed = max(self.computed, self.exchanged)


def test_an_exchange_that_nothing_hides_is_exposed_whole_and_the_computing_before_it_is_not() -> None:
    job = Job(st.ZeRO1())
    updates = [job.micro_batch(0.0, 1.0, 0.5) for _ in range(10 * MICRO_BATCHES)]
    job.device.host = 1e3
    updates += [job.micro_batch(0.0, 0.0, 0.0) for _ in range(MICRO_BATCHES)]
    for times in ("exposed_seconds", "lane_seconds"):
        assert sum(getattr(update, times) for update in updates if update is not None) == pytest.approx(5.0)
    job.parallel.finish()


@pytest.mark.parametrize("strategy", part([st.DPU(), st.WeightPrediction()]))
def test_a_clock_counts_what_the_device_has_computed_and_at_most_one_micro_batch_more(
    strategy: st.Strategy,
) -> None:
    for seed in range(20):
        draws = random.Random(seed)
        compute, lane, launch = draws.uniform(0.5, 1), draws.uniform(0.1, 9), draws.choice([0.0, 0.01, 0.4])
        job = Job(strategy, st.Clock(minimum=1, maximum=64))
        updates = [job.micro_batch(launch, compute, lane) for _ in range(100)]
        counts = [update.micro_batches[0] for update in updates if update is not None][2:]
        enough = math.ceil(lane / compute)
        assert len(counts) > 2
        assert set(counts) <= {enough, enough + 1}, (seed, enough, counts)
        job.parallel.finish()
