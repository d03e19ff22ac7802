"""The image classifier on the digits."""

import pytest
import torch

from stretto import errors
from stretto_lab.recipes.digits_resnet import DigitsResNet, load_digits
from stretto_lab.recipes.task import Task


def built(options: DigitsResNet, rank: int = 0, world_size: int = 1, seed: int = 0) -> Task:
    return options.build(rank, world_size, seed, updates=60)


def train(task: Task, updates: int) -> None:
    batches = iter(task.loader)
    for _ in range(updates):
        task.loss(task.model, next(batches)).value.backward()
        task.optimizer.step()
        task.scheduler.step()
        task.optimizer.zero_grad()


def test_the_two_sides_are_all_the_digits() -> None:
    train_side, heldout = load_digits()
    assert (len(train_side.classes), len(heldout.classes)) == (1438, 359)
    together = torch.cat([train_side.pixels, heldout.pixels])
    from sklearn.datasets import load_digits as whole

    assert together.shape == (1797, 1, 8, 8)
    assert (together.min(), together.max()) == (0, 1)
    # As sets of images they are equal, so no image was lost or taken twice.
    assert sorted(together.flatten(1).tolist()) == sorted(
        (torch.from_numpy(whole().images).float() / 16).flatten(1).tolist()
    )


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_it_learns(optimizer: str) -> None:
    task = built(DigitsResNet(optimizer=optimizer))
    train(task, 60)
    assert task.evaluate(task.model) < 0.5  # ln 10 = 2.3 is chance
    assert task.accuracy(task.model) > 0.9


def test_every_rank_starts_equal_and_building_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    first, second = (built(DigitsResNet(), rank, 2).model.state_dict() for rank in range(2))
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluation_touches_neither_statistics_nor_modes() -> None:
    task = built(DigitsResNet())
    train(task, 3)
    task.model[1].eval()  # a normalisation that the user has frozen
    state = {name: value.clone() for name, value in task.model.state_dict().items()}
    assert task.evaluate(task.model) == task.evaluate(task.model)
    task.accuracy(task.model)
    assert [
        (name, value)
        for name, value in task.model.state_dict().items()
        if not torch.equal(value, state[name])
    ] == []
    assert [name for name, module in task.model.named_modules() if not module.training] == ["1"]


def test_the_held_out_images_do_not_depend_on_the_seed_of_the_run() -> None:
    model = built(DigitsResNet()).model
    assert built(DigitsResNet(), seed=1).evaluate(model) == built(DigitsResNet(), seed=2).evaluate(model)


def test_it_has_batch_statistics_and_weight_one_per_micro_batch() -> None:
    task = built(DigitsResNet())
    assert any(isinstance(module, torch.nn.BatchNorm2d) for module in task.model.modules())
    loss = task.loss(task.model, next(iter(task.loader)))
    assert (loss.weight, loss.samples, loss.value.ndim) == (1.0, 32, 0)


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(errors.ConfigError, match="batch must be at least 2, found 1"):
        DigitsResNet(batch=1)
    with pytest.raises(errors.ConfigError, match="2000 samples cannot be drawn from 1438"):
        built(DigitsResNet(batch=2000))
