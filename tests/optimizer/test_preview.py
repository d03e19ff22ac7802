"""A preview shows what a step would give, and leaves no trace."""

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor

from stretto.optimizer import ShardedOptimizer, read_hyperparameters
from tests.optimizer.owners import (
    OPTIMIZERS,
    gradients_for,
    model_of,
    new_flats,
    owners_of,
    reduced,
)

CLIP = 0.75
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
before_or_after_first_step = pytest.mark.parametrize("steps", [0, 2])


def stepped_owner(name: str, steps: int) -> ShardedOptimizer:
    layout, owners = owners_of(model_of(), OPTIMIZERS[name], 2)
    owner = owners[1]
    for seed in range(steps):
        settings = read_hyperparameters(owner.optimizer)
        owner.step(reduced(owner, gradients_for(layout, seed, set())), settings, 1.0)
    return owner


def identical(left: object, right: object) -> bool:
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return (
            isinstance(right, dict)
            and left.keys() == right.keys()
            and all(identical(left[key], right[key]) for key in left)
        )
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(identical, left, right))
    return left == right


@every_optimizer
def test_preview_keeps_nothing_that_it_was_given(name: str) -> None:
    owner = stepped_owner(name, 1)
    gradient = reduced(owner, gradients_for(owner.layout, 9, set()))
    flats = new_flats(owner.layout)
    owner.preview(gradient, read_hyperparameters(owner.optimizer), CLIP, flats)
    given = [weakref.ref(flat) for flat in flats]
    del flats
    gc.collect()
    assert not any(flat() is not None for flat in given)


@pytest.mark.parametrize("unused", [set(), {"1.weight"}, {"0.bias", "2.weight"}], ids=["none", "one", "two"])
@before_or_after_first_step
@every_optimizer
def test_preview_shows_what_a_step_then_gives(name: str, steps: int, unused: set[str]) -> None:
    owner = stepped_owner(name, steps)
    gradient = reduced(owner, gradients_for(owner.layout, 9, unused))
    settings = read_hyperparameters(owner.optimizer)
    settings[0]["lr"] = settings[1]["lr"] = 0.0625
    previewed, stepped = new_flats(owner.layout), new_flats(owner.layout)
    owner.preview(gradient, settings, CLIP, previewed)
    owner.step(gradient, settings, CLIP)
    owner.publish(stepped)
    assert identical(previewed, stepped)


class Breaking(torch.optim.SGD):
    """Raises in its first step, after it has changed its parameters."""

    countdown = 1

    def step(self, closure: object = None) -> None:
        super().step()
        type(self).countdown -= 1
        if type(self).countdown == 0:
            raise RuntimeError("out of luck")


def test_preview_that_raises_leaves_no_trace_either() -> None:
    layout, (owner,) = owners_of(model_of(), lambda groups: Breaking(groups, lr=0.1, momentum=0.9), 1)
    gradient = reduced(owner, gradients_for(layout, 0, set()))
    before = copy.deepcopy((owner.optimizer.state_dict(), owner.masters, gradient.sums))
    with pytest.raises(RuntimeError, match="out of luck"):
        owner.preview(gradient, read_hyperparameters(owner.optimizer), CLIP, new_flats(layout))
    assert identical(list(before), [owner.optimizer.state_dict(), owner.masters, gradient.sums])
