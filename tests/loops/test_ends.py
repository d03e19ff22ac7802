"""Behind `feed` everything has landed and the model shows committed parameters; a loop that counts nothing is told."""

import dataclasses
import functools
import itertools
import math
import random
from collections import deque

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import stretto
from stretto.errors import GradientsTouched, StepWithoutBackward
from stretto.strategies import STRATEGIES, Strategy
from stretto.strategies.ledger import ledger_of
from stretto_lab.virtual import VirtualCluster
from tests.bits import unequal
from tests.loops.habits import BOTH_KINDS, batches, job, mean_square, network

EVERY = [pytest.param(kind(), id=name) for name, kind in STRATEGIES.items()]


@dataclasses.dataclass(frozen=True)
class Epoch:
    """What one rank finds behind one `feed`."""

    fed: int
    """Micro-batches so far, of this rank."""
    committed: list[int]
    """Micro-batches so far in committed updates, by rank."""
    steps: int
    weight: Tensor


def epochs(
    rank: int,
    group: dist.ProcessGroup,
    strategy: Strategy,
    lengths: list[int],
    micro_batches: int,
    until: str,
) -> list[Epoch]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    parallel = job(model, strategy, micro_batches=micro_batches, group=group)
    updates: list[stretto.Update] = []
    found, fed = [], 0
    for _ in range(2):
        for batch in parallel.feed(batches(lengths[rank]), until=until, on_update=updates.append):
            fed += 1
            parallel.backward(mean_square(model, batch))
        committed = [sum(update.micro_batches[index] for update in updates) for index in range(len(lengths))]
        found.append(
            Epoch(
                fed,
                committed,
                parallel.steps,
                model.weight.detach().clone(),
            )
        )
        model.state_dict()  # which no estimate gives
    assert parallel.finish() == []
    averages = ("average", "local", "diloco", "paft-sync", "paft-dyn")
    assert torch.equal(model.weight, found[-1].weight) or strategy.name in averages
    return found


@pytest.mark.parametrize("strategy", EVERY)
def test_behind_feed_every_batch_is_committed_and_committed_parameters_are_shown(strategy: Strategy) -> None:
    draws = random.Random(5)
    for case in range(3):
        equal = case == 0
        lengths = [draws.randint(1, 9)] * 2 if equal else [draws.randint(1, 9) for _ in range(2)]
        micro_batches, until = draws.randint(2, 4), ("any", "all")[case // 2]
        program = functools.partial(
            epochs, strategy=strategy, lengths=lengths, micro_batches=micro_batches, until=until
        )
        ranks = VirtualCluster(2).run(program).values
        for number, (one, other) in enumerate(zip(*ranks, strict=True), start=1):
            where = (lengths, micro_batches, until)
            # Ranks that step alone may not be told of the others' last batches.
            assert (one.committed[0], other.committed[1]) == (one.fed, other.fed), where
            assert one.committed == other.committed or ledger_of(strategy).local, where
            assert torch.equal(one.weight, other.weight), where
            if equal:
                assert one.steps == number * math.ceil(lengths[0] / micro_batches), where


def test_a_prediction_that_is_hidden_between_epochs_comes_back() -> None:
    rate, model, twin = 0.1, network(), network()
    strategy = stretto.WeightPrediction()
    parallel = stretto.DataParallel(model, torch.optim.SGD(model.parameters(), lr=rate), strategy)
    committed = [parameter.detach().clone() for parameter in model.parameters()]

    def land(gradients: tuple[Tensor, ...]) -> None:
        for value, shown, gradient in zip(committed, twin.parameters(), gradients, strict=True):
            value.sub_(gradient, alpha=rate)
            shown.data = value.sub(gradient, alpha=rate)

    for _ in range(3):
        for batch in parallel.feed(batches(3)):
            parallel.backward(mean_square(model, batch))
        in_flight: tuple[Tensor, ...] | None = None
        for batch in batches(3):  # one round late, and predicted with the gradient that has just come
            gradients = torch.autograd.grad(mean_square(twin, batch), list(twin.parameters()))
            if in_flight is not None:
                land(in_flight)
            in_flight = gradients
        land(in_flight)
        assert unequal(model.parameters(), committed) == []
    parallel.finish()


@pytest.mark.parametrize("strategy", BOTH_KINDS, ids=lambda strategy: strategy.name)
def test_a_stop_lasts_over_epochs_and_lands_everything(strategy: Strategy) -> None:
    model = network()
    parallel = job(model, strategy, micro_batches=4)
    for number, batch in enumerate(parallel.feed(batches(50)), start=1):
        parallel.backward(mean_square(model, batch))
        if number == 3:
            parallel.stop()
    steps = parallel.steps
    assert list(parallel.feed(batches())) == []
    parallel.finish()
    assert parallel.steps == steps


def test_a_loop_that_only_looks_at_its_batches_is_told_at_the_end_of_the_data() -> None:
    model = network()
    parallel = job(model)
    feed = parallel.feed(batches())
    with pytest.raises(
        StepWithoutBackward, match=r"8 batches, and not one micro-batch: .*parallel\.backward"
    ):
        deque(mean_square(model, batch) for batch in feed)


def test_a_loop_that_calls_backward_of_the_loss_is_told_at_its_second_batch() -> None:
    model = network()
    parallel = job(model)
    feed = parallel.feed(itertools.cycle(batches()), updates=100)
    with pytest.raises(GradientsTouched, match=r"or of loss\.backward\(\)"):
        deque(mean_square(model, batch).backward() for batch in feed)
