"""Recipes: Python functions that return everything a run starts from, as one typed configuration."""

from collections.abc import Callable

from stretto.fields import unknown_name
from stretto.recipes.batches import MicroBatches, reshard
from stretto.recipes.digits_resnet import DigitsResNet, digits_resnet
from stretto.recipes.stdlib_gpt import StdlibGPT, stdlib_gpt
from stretto.recipes.task import Loss, ResumableLoader, Task, TaskConfig

RECIPES: dict[str, Callable[[], TaskConfig]] = {"stdlib-gpt": stdlib_gpt, "digits-resnet": digits_resnet}
"""Name on the command line to recipe."""


def recipe(name: str) -> TaskConfig:
    """The configuration that the recipe `name` returns.

    Raises:
        UnknownName: No recipe is called that.
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
    "digits_resnet",
    "recipe",
    "reshard",
    "stdlib_gpt",
]
