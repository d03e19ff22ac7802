"""What every recipe does that needs no files of people, and what none takes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stretto.errors import ConfigError
from stretto_lab.recipes.corpus import Text
from stretto_lab.recipes.digits_resnet import DigitsResNet
from stretto_lab.recipes.gpt import Shape, causal_lm
from stretto_lab.recipes.language import OwnTokens
from stretto_lab.recipes.rows import Heldout
from stretto_lab.recipes.stdlib_gpt import StdlibGPT
from stretto_lab.recipes.task import Task
from stretto_lab.testing import differing

SMALL: dict[str, Any] = {"context": 32, "batch": 4, "evaluation_windows": 16, "data": Text(megabytes=0.2)}
TEXT = StdlibGPT(size="0.1m", lr=3e-3, **SMALL)
RECIPES: dict[str, tuple[Any, int, float, float]] = {
    "sgd": (DigitsResNet(), 60, 2, 0.5),  # ln 10 = 2.3 is chance
    "adamw": (DigitsResNet(optimizer="adamw"), 60, 2, 0.5),
    # From about ln 256 = 5.55 at the start to the frequencies of the bytes, which have about 3.3 nats.
    "text": (TEXT, 30, 5, 4.5),
}
"""Options, and after how many updates the loss falls from above one number to below the other."""


def train(task: Task, updates: int) -> None:
    batches = iter(task.loader)
    for _ in range(updates):
        task.loss(task.model, next(batches)).value.backward()
        task.optimizer.step()
        task.scheduler.step()
        task.optimizer.zero_grad()


def state(task: Task) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in task.model.state_dict().items()}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_learns(name: str) -> None:
    options, updates, above, below = RECIPES[name]
    task = options.build(0, 1, 0, 60)
    assert task.evaluate(task.model) > above
    train(task, updates)
    assert task.evaluate(task.model) < below
    assert name == "text" or task.accuracy(task.model) > 0.9


@pytest.mark.parametrize("options", [DigitsResNet(), TEXT], ids=["digits", "text"])
def test_ranks_start_equal_from_their_seed_and_building_leaves_the_random_state_alone(options: Any) -> None:
    before = torch.get_rng_state()
    first, second, other = (options.build(*ranks, None) for ranks in ((0, 2, 0), (1, 2, 0), (0, 2, 1)))
    assert torch.equal(torch.get_rng_state(), before)
    assert differing(state(first), state(second)) == []
    assert differing(state(first), state(other)) != []
    loss = first.loss(first.model, next(iter(first.loader)))
    assert (loss.weight, loss.samples, loss.value.ndim) == (1.0, options.batch, 0)


@pytest.mark.parametrize("options", [DigitsResNet(), TEXT], ids=["digits", "text"])
def test_evaluations_are_equal_on_all_ranks_seeds_and_times_and_leave_the_model_alone(options: Any) -> None:
    task, other = options.build(0, 1, 0, 60), options.build(1, 2, 9, 60)
    train(task, 3)
    frozen = next(name for name, module in task.model.named_modules() if name and not [*module.children()])
    task.model.get_submodule(frozen).eval()  # a part that the user has frozen
    before = state(task)
    first = task.evaluate(task.model)
    next(iter(task.loader))
    assert [task.evaluate(task.model), other.evaluate(task.model)] == [first, first]
    assert differing(before, state(task)) == []
    assert [name for name, one in task.model.named_parameters() if one.grad is not None] == []
    assert [name for name, module in task.model.named_modules() if not module.training] == [frozen]


IMPOSSIBLE: list[tuple[Callable[[], object], str]] = [
    (lambda: DigitsResNet(batch=1), "batch must be at least 2, found 1"),
    (lambda: DigitsResNet(batch=2000).build(0, 1, 0, 60), "2000 samples cannot be drawn from 1438"),
    (lambda: StdlibGPT(context=0), "context must be at least 1, found 0"),
    (lambda: StdlibGPT(size="3x48x5", **SMALL).build(0, 1, 0, 60), "width of 48 cannot be cut into 5 heads"),
    (lambda: OwnTokens(vocabulary=256), "vocabulary must be at least 257"),
    (lambda: Heldout(share=1.0), "share must be between 0 and 1"),
    (lambda: StdlibGPT(size="3x0x3"), "LAYERSxWIDTHxHEADS as 4x200x4, found '3x0x3'"),
    (
        lambda: causal_lm("llama", Shape(1, 48, 16), vocabulary=9, context=8, dtype=torch.float32, seed=0),
        "heads of equal even width",
    ),
]  # fmt: skip


def test_impossible_settings_are_refused() -> None:
    for build, words in IMPOSSIBLE:
        with pytest.raises(ConfigError, match=words):
            build()
