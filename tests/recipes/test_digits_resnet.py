"""The image classifier on the digits."""

import torch

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
