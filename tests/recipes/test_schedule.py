"""The learning rate over the updates, and the optimizers it turns."""

import pytest
import torch
from torch import nn

from stretto import errors
from stretto_lab.recipes.optimizers import SGD, AdamW, Schedule


def test_the_rate_rises_to_one_and_falls_along_a_half_cosine_to_the_floor() -> None:
    factor = Schedule(warmup=4, floor=0.2).factor(updates=104)
    assert [factor(done) for done in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert factor(4) == 1.0
    assert factor(54) == pytest.approx(0.6)  # half way: the mean of 1 and the floor
    assert factor(104) == pytest.approx(0.2)
    assert factor(500) == pytest.approx(0.2)
    falling = [factor(done) for done in range(4, 105)]
    assert falling == sorted(falling, reverse=True)


def test_without_a_known_end_the_rate_stays() -> None:
    factor = Schedule(warmup=2).factor(updates=None)
    assert [factor(done) for done in (0, 1, 2, 100_000)] == [0.5, 1.0, 1.0, 1.0]


def test_a_short_run_warms_up_for_a_tenth_of_it_at_most() -> None:
    assert Schedule(warmup=20).factor(updates=30)(2) == 1.0
    assert Schedule(warmup=20).factor(updates=1)(0) == 1.0


def test_a_saved_schedule_continues_in_a_longer_run() -> None:
    def scheduler(updates: int) -> torch.optim.lr_scheduler.LambdaLR:
        return Schedule(warmup=2).build(SGD().build(nn.Linear(2, 2), lr=1.0), updates)

    stopped, longer = scheduler(10), scheduler(100)
    stopped.optimizer.step()
    for _ in range(10):
        stopped.step()
    longer.load_state_dict(stopped.state_dict())
    longer.optimizer.step()
    longer.step()
    assert longer.get_last_lr() == [Schedule(warmup=2).factor(100)(11)]


def test_adamw_decays_matrices_only_and_leaves_frozen_parameters_out() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model[2].weight.requires_grad_(False)
    matrices, vectors = AdamW(weight_decay=0.3).build(model, lr=0.1).param_groups
    assert [id(one) for one in matrices["params"]] == [id(model[0].weight)]
    assert [one.ndim for one in vectors["params"]] == [1, 1, 1, 1]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert matrices["betas"] == (0.9, 0.95)


def test_adamw_has_no_group_without_parameters_whose_rate_no_checkpoint_could_keep() -> None:
    (group,) = AdamW(weight_decay=0.3).build(nn.Linear(3, 4, bias=False), lr=0.1).param_groups
    assert group["weight_decay"] == 0.3


def test_impossible_schedules_are_refused() -> None:
    with pytest.raises(errors.ConfigError, match="found -1 updates"):
        Schedule(warmup=-1)
    with pytest.raises(errors.ConfigError, match=r"found 1\.5"):
        Schedule(floor=1.5)
