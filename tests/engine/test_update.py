"""What an `Update` reports is what happened."""

import json
import math

import pytest
import torch

from stretto import ACCO, ZeRO1
from tests.exactness.jobs import (
    Case,
    build_model,
    describe,
    mean_loss,
    parameters_of,
    same,
    stream,
    wrap,
)
from tests.exactness.matrix import CASES, observed
from tests.exactness.reference import trace

every_case = pytest.mark.parametrize("index", range(len(CASES)), ids=map(describe, CASES))


@pytest.mark.long(keep=len(CASES))
@every_case
def test_loss_and_gradient_norm_are_those_of_the_weighted_mean_over_ranks_before_clipping(index: int) -> None:
    case = CASES[index]
    first = observed("two")[0][index].updates[0]
    model = build_model(case)
    batches = [batch for rank in range(2) for batch in stream(case, rank)[:4]]
    weight = sum(batch[2] for batch in batches)
    loss = sum(mean_loss(model, batch).double() * batch[2] for batch in batches) / weight
    # ACCO and the like have taken all of the first update's gradients at the start too. Sums of 8 float32 terms.
    assert first.loss == pytest.approx(float(loss.detach()), rel=8 * 2.0**-24)
    assert first.weight == pytest.approx(weight, rel=1e-15)
    assert first.samples == sum(len(batch[0]) for batch in batches)
    assert first.micro_batches == (4, 4)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = float(torch.cat([g.flatten() for g in gradients]).double().norm())
    assert first.gradient_norm == pytest.approx(norm, rel=1e-5)


@every_case
def test_steps_rounds_and_staleness_are_counted(index: int) -> None:
    updates = observed("two")[0][index].updates
    strategy = CASES[index].strategy
    rounds = len(updates[0].rounds)
    assert [u.step for u in updates] == list(range(1, len(updates) + 1))
    assert [u.round_index for u in updates] == [rounds * (k + 1) - 1 for k in range(len(updates))]
    # The first gradient of all cannot be stale.
    assert [u.staleness for u in updates] == [0] + [strategy.staleness] * (len(updates) - 1)


@every_case
def test_times_add_up(index: int) -> None:
    for update in observed("two")[0][index].updates:
        assert 0 <= update.exposed_seconds <= update.seconds
        assert update.lane_seconds > 0


def test_synchronous_update_is_exposed_as_long_as_its_lane_works() -> None:
    for case, found in zip(CASES, observed("two")[0], strict=True):
        if not case.strategy.overlaps:
            assert [u for u in found.updates if not u.exposed_seconds >= u.lane_seconds] == [], describe(case)


def test_rates_hold_from_the_first_take_off_of_an_update_to_its_commit() -> None:
    # An estimate and the update that it anticipates must use the same rate, whoever turns it in between.
    case = Case(strategy=ACCO(), scheduled=False, lengths=(16,))
    model, parallel = wrap(case)
    optimizer = parallel.optimizer
    rates = [group["lr"] for group in optimizer.param_groups]
    for index, batch in enumerate(stream(case, 0)):
        # First halves take off before micro-batches 2, 6, 10, second halves before 4, 8, 12.
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = 1e3 if index % 4 in (3, 0) else lr
        parallel.backward(mean_loss(model, batch))
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr
    parallel.finish()
    assert parallel.steps == 4
    assert same(parameters_of(model), trace(case, 1, [[[2], [2]]] * 4).committed[-1])


def test_step_without_a_loss_reports_nan_as_null() -> None:
    case = Case(strategy=ZeRO1())
    model, parallel = wrap(case, micro_batches=1)
    mean_loss(model, stream(case, 0)[0]).backward()
    update = parallel.count_micro_batch(samples=3)
    assert update is not None
    assert math.isnan(update.loss)
    assert update.samples == 3
    assert json.loads(json.dumps(update.as_json()))["loss"] is None
