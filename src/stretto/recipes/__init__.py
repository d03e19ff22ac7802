"""Models and data that a run starts from, by name."""

from collections.abc import Callable

from stretto.fields import unknown_name
from stretto.recipes.batches import MicroBatches, reshard
from stretto.recipes.digits_resnet import DigitsResNet
from stretto.recipes.stdlib_gpt import StdlibGPT
from stretto.recipes.task import Loss, ResumableLoader, Task, TaskConfig

RECIPES: dict[str, Callable[[], TaskConfig]] = {"stdlib-gpt": StdlibGPT, "digits-resnet": DigitsResNet}
"""From the name on the command line to the recipe: what it returns are the default options."""


def recipe(name: str) -> TaskConfig:
    """Return the default options of the recipe `name`.

    Raises:
        UnknownName: There is no such recipe.
    """
    if name not in RECIPES:
        raise unknown_name("no recipe is called", name, RECIPES)
    return RECIPES[name]()


__all__ = [
    "RECIPES",
    "DigitsResNet",
    "Loss",
    "MicroBatches",
    "ResumableLoader",
    "StdlibGPT",
    "Task",
    "TaskConfig",
    "recipe",
    "reshard",
]
