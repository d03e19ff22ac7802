"""Users' own recipes, from a file or a package: `path/to/file.py:sine` or `package.module:sine`.

    def sine(rank: int, world_size: int, seed: int, updates: int | None, *, hidden: int = 32) -> Task:

The arguments before the star come from `TaskConfig.build`. The arguments after it are the recipe's options: each
needs a type and a default. A frozen dataclass with `build`, as the library's own recipes are, can replace the
function.

A file is imported as Python imports a script's neighbours: its folder is added to the import path, and its name
becomes the module's name. Workers have the same import path, so pickled objects can refer to the module by its name.
"""

import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from stretto.errors import ConfigError
from stretto.fields import check_fields, did_you_mean, unknown_name
from stretto_lab.recipes.task import Task, TaskConfig

GIVEN = ("rank", "world_size", "seed", "updates")
"""Arguments that the run passes to a recipe; see `TaskConfig.build`."""


def names_own(name: str) -> bool:
    """Return whether `name` is the place of a user's own recipe instead of the name of a library recipe."""
    return ":" in name or name.endswith(".py")


def own_recipe(place: str) -> TaskConfig:
    """Return the default options of the recipe at `place`.

    Raises:
        UnknownName: The file, the module or the function does not exist.
        ConfigError: It cannot be imported, or is no recipe.
    """
    found = imported(place, "recipe")
    default = found() if inspect.isclass(found) and not _required(found) else options_of(found)()
    if not dataclasses.is_dataclass(default) or not isinstance(default, TaskConfig):
        raise ConfigError(
            f"{place} is a class without fields and build: expected a dataclass as in the page recipes"
        )
    return default


def imported(place: str, what: str) -> Any:
    """Return the function or class in a user's file or module.

    Args:
        place: path/to/file.py:function or package.module:function.
        what: The expected kind of object, for messages.

    Raises:
        UnknownName: The file, the module or the function does not exist.
        ConfigError: The file or the module cannot be imported.
    """
    source, name = _parts(place)
    module = _import_file(Path(source), what) if source.endswith(".py") else _import_module(source)
    made_here = [key for key, one in vars(module).items() if _is_made_in(one, module) and key[:1] != "_"]
    if not name:
        raise ConfigError(f"{place} needs the name of a function, as {source}:{(made_here or ['NAME'])[0]}")
    if not callable(getattr(module, name, None)):
        raise unknown_name(f"{source} has no {what}", name, made_here)
    return getattr(module, name)


def absolute(place: str) -> str:
    """Return `place` with an absolute path; the name of a module stays unchanged."""
    source, name = _parts(place)
    return f"{Path(source).resolve()}:{name}" if source.endswith(".py") else place


def digest(place: str) -> str | None:
    """Return a digest of the file at `place`, without importing it; None if there is no file."""
    source, _ = _parts(place)
    file = Path(source) if source.endswith(".py") else _file_of_module(source)
    return hashlib.sha256(file.read_bytes()).hexdigest() if file is not None and file.is_file() else None


def _file_of_module(name: str) -> Path | None:
    """Return the file of a module, without importing its packages as `importlib.util.find_spec` would."""
    folders: Sequence[str] | None = [str(Path().resolve()), *sys.path]
    found, parts = None, name.split(".")
    for last in range(len(parts)):
        found = PathFinder.find_spec(".".join(parts[: last + 1]), folders)
        folders = None if found is None else found.submodule_search_locations
        if folders is None:
            break
    return Path(found.origin) if found is not None and found.name == name and found.origin else None


@functools.cache
def options_of(function: Callable[..., Task]) -> type:
    """Return a frozen dataclass of the options of `function`; its `build` calls the function.

    Raises:
        ConfigError: An argument is missing, or has no type or no default.
    """
    name, arguments = function.__name__, inspect.signature(function).parameters
    given = [key for key, one in arguments.items() if one.kind is one.POSITIONAL_OR_KEYWORD]
    if tuple(given) != GIVEN:
        raise ConfigError(
            f"{name}({', '.join(given)}): a recipe takes rank, world_size, seed and updates, and after a star its "
            "options; see the page recipes"
        )
    options = {key: one for key, one in arguments.items() if key not in GIVEN}
    kinds = get_type_hints(function)
    for key, one in options.items():
        if one.kind is not one.KEYWORD_ONLY or one.default is one.empty or key not in kinds:
            raise ConfigError(f"option {key} of {name} needs a type and a default, as {key}: float = 0.1")

    def build(self: Any, rank: int, world_size: int, seed: int, updates: int | None) -> Task:
        return function(rank, world_size, seed, updates, **_values(self))

    def reduce(self: Any) -> Any:
        return _revive, (function, _values(self))  # the class has no name that a worker could look up

    return dataclasses.make_dataclass(
        name,
        [(key, kinds[key], dataclasses.field(default=one.default)) for key, one in options.items()],
        namespace={
            "__doc__": inspect.getdoc(function),
            "__module__": function.__module__,
            "__post_init__": check_fields,
            "__reduce__": reduce,
            "build": build,
        },
        frozen=True,
        kw_only=True,
    )


def _values(options: Any) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}


def _revive(function: Callable[..., Task], values: Mapping[str, Any]) -> Any:
    return options_of(function)(**values)


def _parts(place: str) -> tuple[str, str]:
    """Cut "file.py:name" into two parts; without a name the second part is empty."""
    source, colon, name = place.rpartition(":")
    return (source, name) if colon else (name, "")


def _is_made_in(value: Any, module: ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def _required(kind: type) -> list[str]:
    return [key for key, one in inspect.signature(kind).parameters.items() if one.default is one.empty]


def _import_file(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        neighbours = [one.name for one in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise ConfigError(f"there is no {what} file {path}{did_you_mean(path.name, neighbours)}")
    known, name = sys.modules.get(path.stem), path.stem
    found = importlib.util.find_spec(name) if known is None and "." not in name else known and known.__spec__
    if "." in name or not _is_file(found, path):
        raise ConfigError(
            f"the {what} file {path} cannot be imported as {name!r}: another module has this name, or it contains a "
            "dot; rename the file"
        )
    _put_on_path(path.parent)
    return _import(name, str(path))


def _is_file(found: Any, path: Path) -> bool:
    """Return whether a module name is free, or already belongs to this file."""
    return found is None or (found.origin is not None and Path(found.origin).resolve() == path.resolve())


def _import_module(name: str) -> ModuleType:
    _put_on_path(Path())
    return _import(name, name)


def _put_on_path(folder: Path) -> None:
    if str(folder.resolve()) not in sys.path:
        sys.path.insert(0, str(folder.resolve()))
    importlib.invalidate_caches()  # the file may be younger than what was read of its folder


def _import(name: str, shown: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        where = f", {frames[-1].filename} line {frames[-1].lineno}" if len(frames) > 1 else ""
        reason = " ".join(str(error).split())
        raise ConfigError(f"cannot import {shown}: {type(error).__name__}: {reason}{where}") from error
