"""What a checkpoint brings back at odd moments, and of optimizers and their schedules."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from stretto import DataParallel, WeightPrediction, checkpoint
from stretto_lab.testing import differing
from tests.checkpoint.jobs import NAMES, SAVED_AT, STRATEGIES, Case, Job


def test_a_first_round_can_be_saved_before_it_takes_off(tmp_path: Path) -> None:
    job = Job(Case())
    inputs, targets, used = next(iter(job.batches))  # half of ACCO's first update
    job.parallel.backward((job.model(inputs, used) - targets).square().mean())
    job.save(tmp_path)
    straight = job.train().holds()
    continuing = Job(Case())
    continuing.load(tmp_path)
    assert differing(straight, continuing.train().holds()) == []


@pytest.mark.parametrize("strategy", STRATEGIES, ids=NAMES)
def test_an_end_can_be_saved_and_continued(strategy: object, tmp_path: Path) -> None:
    case = dataclasses.replace(Case(), strategy=strategy)
    ending = Job(case).train(SAVED_AT)
    ending.parallel.finish()
    ending.save(tmp_path)
    end = {name: value.clone() for name, value in ending.model.state_dict().items()}
    continuing = Job(case)
    restored = continuing.load(tmp_path)
    assert restored.step == ending.parallel.steps
    assert {n for n, v in continuing.model.state_dict().items() if not torch.equal(v, end[n])} == set()
    continuing.train(restored.step + 2)


def test_hyperparameters_come_back_with_what_a_scheduler_has_added(tmp_path: Path) -> None:
    job = Job(Case()).train(SAVED_AT)
    job.save(tmp_path)
    fresh = Job(Case())
    for group in fresh.optimizer.param_groups:
        del group["initial_lr"]
        group["betas"] = (0.5, 0.5)
    checkpoint.load(fresh.parallel, tmp_path)
    settings = [
        [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        for optimizer in (job.optimizer, fresh.optimizer)
    ]
    assert settings[0] == settings[1]
    assert settings[0][0]["lr"] == 0.01 * (1 / (1 + 0.3 * SAVED_AT))
    assert settings[0][0]["initial_lr"] == 0.01


@pytest.mark.parametrize("saves", [True, False])
def test_a_scheduler_that_only_one_side_has_is_told_of(saves: bool, tmp_path: Path) -> None:
    def job(scheduled: bool) -> DataParallel:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer) if scheduled else None
        return DataParallel(model, optimizer, scheduler=schedule)

    saving = job(saves)
    saving.backward(saving.model(torch.ones(1, 2)).sum())
    checkpoint.save(saving, tmp_path)
    *_, note = checkpoint.load(job(not saves), tmp_path).notes
    assert "scheduler, " in note
    assert "not restored" in note


def test_a_continued_run_can_be_saved_and_continued_again(tmp_path: Path) -> None:
    straight = Job(Case(strategy=WeightPrediction())).train().holds()
    Job(Case(strategy=WeightPrediction())).train(SAVED_AT).save(tmp_path)
    for step in (SAVED_AT + 1, SAVED_AT + 2):
        job = Job(Case(strategy=WeightPrediction()))
        job.load(tmp_path)
        job.train(step).save(tmp_path)
    assert differing(straight, {**job.train().holds(), "losses": straight["losses"]}) == []


def test_a_group_without_parameters_keeps_its_settings(tmp_path: Path) -> None:
    """A chained schedule goes on from the learning rate that the group has."""

    def start() -> DataParallel:
        model = nn.Linear(3, 2)
        groups = [{"params": []}, {"params": list(model.parameters())}, {"params": [], "lr": 0.5}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return DataParallel(model, optimizer, scheduler=schedule)

    def rates(parallel: DataParallel) -> list[tuple[float, ...]]:
        updates = [parallel.backward(parallel.model(torch.ones(3)).sum()) for _ in range(2)]
        return [update.learning_rates for update in updates if update is not None]

    saving, continuing = start(), start()
    rates(saving)
    checkpoint.save(saving, tmp_path)
    checkpoint.load(continuing, tmp_path)
    assert rates(continuing) == rates(saving) == [(0.025, 0.025, 0.125), (0.0125, 0.0125, 0.0625)]
