"""Models and data for runs, by name."""

from collections.abc import Callable

from stretto.fields import unknown_name
from stretto_lab.recipes.batches import MicroBatches, reshard
from stretto_lab.recipes.digits_resnet import DigitsResNet
from stretto_lab.recipes.language import Language
from stretto_lab.recipes.own import absolute, digest, imported, names_own, own_recipe
from stretto_lab.recipes.stdlib_gpt import StdlibGPT
from stretto_lab.recipes.task import Loss, OverFiles, ResumableLoader, Task, TaskConfig

RECIPES: dict[str, Callable[[], TaskConfig]] = {
    "stdlib-gpt": StdlibGPT,
    "digits-resnet": DigitsResNet,
    "language": Language,
}
"""By name on the command line: the recipe, which returns its default options."""


def recipe(name: str) -> TaskConfig:
    """Return the default options of a recipe.

    Args:
        name: One of `RECIPES`, or a user's own recipe: path/to/file.py:function or package.module:function.

    Raises:
        UnknownName: There is no such recipe.
        ConfigError: The user's own recipe cannot be imported, or is not a recipe.
    """
    if names_own(name):
        return own_recipe(name)
    if name not in RECIPES:
        raise unknown_name("no recipe is called", name, [*RECIPES, "FILE.py:FUNCTION"])
    return RECIPES[name]()


__all__ = [
    "RECIPES",
    "DigitsResNet",
    "Language",
    "Loss",
    "MicroBatches",
    "OverFiles",
    "ResumableLoader",
    "StdlibGPT",
    "Task",
    "TaskConfig",
    "absolute",
    "digest",
    "imported",
    "names_own",
    "recipe",
    "reshard",
]
