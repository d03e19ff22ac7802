"""Several optimizers in one job, each with its own settings and schedule."""

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from stretto import ACCO, DataParallel
from stretto.errors import ConfigError, OptimizerStepped, ParametersTouched, UnsupportedOptimizer, UsageError
from tests.optimizer.bowls import Bowls

SHAPES = [(4, 6), (6,)]


def two(model: Bowls, **settings: Any) -> tuple[optim.Optimizer, optim.Optimizer]:
    return optim.Muon([model.values[0]], lr=0.05), optim.AdamW([model.values[1]], lr=0.1, **settings)


def test_one_schedule_may_be_of_any_of_them() -> None:
    model = Bowls(SHAPES)
    muon, adamw = two(model)
    with DataParallel(model, [muon, adamw], scheduler=ExponentialLR(adamw, 0.5)) as job:
        job.backward(model(0))
        assert (muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"]) == (0.05, 0.05)
        muon.param_groups[0]["lr"] = 0.01
        update = job.backward(model(0))
    assert update is not None
    assert update.learning_rates == (0.01, 0.05)


def test_one_schedule_may_be_of_all_of_them() -> None:
    model = Bowls(SHAPES)
    with DataParallel(model, two(model)) as job:
        scheduler = ExponentialLR(job.optimizer, 0.5)
        job.backward(model(0))
        scheduler.step()
        update = job.backward(model(0))
    assert update is not None
    assert update.learning_rates == (0.025, 0.05)


def test_a_sequence_of_one_is_that_one() -> None:
    model = Bowls(SHAPES)
    optimizer = optim.AdamW(model.values)
    with DataParallel(model, [optimizer]) as job:
        assert job.optimizer is optimizer


def test_a_parameter_in_two_of_them_is_refused() -> None:
    model = Bowls(SHAPES)
    with pytest.raises(UnsupportedOptimizer, match=r"shape \(6,\) is in two of them, AdamW and SGD"):
        DataParallel(model, [optim.AdamW(model.values), optim.SGD([model.values[1]])])
    with pytest.raises(UnsupportedOptimizer, match="AdamW and AdamW"):
        DataParallel(model, [optim.AdamW(model.values)] * 2)


def test_a_parameter_in_none_of_them_is_refused() -> None:
    model = Bowls(SHAPES)
    with pytest.raises(UnsupportedOptimizer, match="in no group of the optimizer, among them"):
        DataParallel(model, [optim.Muon([model.values[0]]), optim.SGD([nn.Parameter(torch.ones(3))])])


@pytest.mark.parametrize(
    ("given", "found"), [([], "none"), (["adamw"], "str"), ([nn.Linear(2, 2)], "Linear")]
)
def test_anything_else_in_a_sequence_is_refused(given: list[Any], found: str) -> None:
    with pytest.raises(UnsupportedOptimizer, match=f"found a sequence of {found}"):
        DataParallel(Bowls(SHAPES), given)


def test_the_one_that_cannot_be_sharded_is_named() -> None:
    model = Bowls(SHAPES)
    muon, _ = two(model)
    with pytest.raises(UnsupportedOptimizer, match="LBFGS cannot step"):
        DataParallel(model, [muon, optim.LBFGS([model.values[1]])])


def test_a_schedule_of_another_optimizer_is_refused_wherever_it_stands() -> None:
    model = Bowls(SHAPES)
    muon, adamw = two(model)
    foreign = ExponentialLR(optim.SGD([nn.Parameter(torch.ones(3))]), 0.5)
    with pytest.raises(ConfigError, match="its learning rates would have no effect"):
        DataParallel(model, [muon, adamw], scheduler=[ExponentialLR(muon, 0.5), foreign])
    with pytest.raises(ConfigError, match="needs a metric at every step"):
        DataParallel(model, [muon, adamw], scheduler=[ReduceLROnPlateau(muon)])


def test_what_only_the_library_does_is_an_error_on_each_of_them() -> None:
    for index in range(2):
        model = Bowls(SHAPES)
        optimizers = two(model)
        schedulers = [ExponentialLR(one, 0.5) for one in optimizers]
        job = DataParallel(model, optimizers, scheduler=schedulers)
        with pytest.raises(OptimizerStepped):
            optimizers[index].step()
        with pytest.raises(UsageError, match="the state of this optimizer is empty"):
            optimizers[index].state_dict()
        job.backward(model(0))
        schedulers[index].step()
        with pytest.raises(UsageError, match="no other call of scheduler"):
            job.backward(model(0))


def test_a_group_that_is_added_later_is_noticed() -> None:
    model = Bowls(SHAPES)
    muon, adamw = two(model)
    job = DataParallel(model, [muon, adamw])
    adamw.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(ParametersTouched, match=r"hold \[1, 1, 1\] parameters, \[1, 1\]"):
        job.backward(model(0))


def test_after_the_job_each_is_an_ordinary_optimizer_again() -> None:
    model = Bowls(SHAPES)
    muon, adamw = two(model)
    with DataParallel(model, [muon, adamw], ACCO(), micro_batches=2) as job:
        for _ in job.feed(range(4)):
            job.backward(model(0))
        job.finish()
    model(0).backward()
    for one in (muon, adamw):
        one.step()
        assert len(one.state_dict()["state"]) == 1
