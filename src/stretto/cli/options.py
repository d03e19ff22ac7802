"""Configurations from words of the command line: every field is an option, and its docstring is the help.

tyro finds options and prints the help. The values are read here, after tyro is done, by the types of the fields: so a
mistake is an error like any other, in one line and with the word that was probably meant.
"""

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType, NoneType, UnionType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, Union, get_args, get_origin

from stretto.engine import Clock
from stretto.errors import ConfigError, MissingExtra, UnknownName
from stretto.faults import Fault, faults_text, parse_faults
from stretto.fields import did_you_mean, read_value
from stretto.recipes import RECIPES, recipe
from stretto.train.arms import parse_clock, parse_learning_rates, split_list
from stretto.virtual import parse_slowness

if TYPE_CHECKING:
    from tyro.constructors import (
        PrimitiveConstructorSpec,
        PrimitiveTypeInfo,
        StructConstructorSpec,
        StructTypeInfo,
    )

ConfigT = TypeVar("ConfigT")


def parse_options(
    command: str, words: Sequence[str], configure: Callable[[Any], ConfigT]
) -> tuple[str, ConfigT]:
    """Read "RECIPE [OPTIONS]".

    Args:
        command: Its name, for help and messages.
        words: What follows it.
        configure: Makes the command's configuration from a recipe's; its fields are the options.

    Returns:
        The recipe's name and the configuration.

    Raises:
        UnknownName: No recipe, or no option, is called so.
        ConfigError: A value cannot be read, or cannot be.
        MissingExtra: tyro is not installed.
        SystemExit: The help was asked for; it is printed.
    """
    if not words or words[0].startswith("-"):
        raise UnknownName(f"{command} needs a recipe first: {', '.join(RECIPES)}")
    name, *options = words
    configuration: ConfigT = _parse(f"stretto {command} {name}", options, configure(recipe(name)))
    return name, configuration


def parse_alone(command: str, words: Sequence[str], default: ConfigT) -> ConfigT:
    """Read the options of a command without a recipe; the errors are those of `parse_options`."""
    configuration: ConfigT = _parse(f"stretto {command}", words, default)
    return configuration


def _parse(program: str, words: Sequence[str], default: Any) -> Any:
    try:
        import tyro
    except ImportError as error:
        raise MissingExtra("tyro", "cli", "the command line") from error
    kind = default.__class__
    registry = tyro.constructors.ConstructorRegistry()
    registry.primitive_rule(_one_option)
    registry.struct_rule(_Drafting())
    found: tuple[Any, list[str]] = tyro.cli(
        kind[type(default.task)] if hasattr(default, "task") else kind,  # its options are fields too
        prog=program,
        description=inspect.getdoc(kind),
        args=list(words),
        default=default,
        registry=registry,
        return_unknown_args=True,
    )
    draft, unknown = found
    if unknown:
        raise _unknown_word(program, unknown[0], words, list(draft.options()))
    return draft.made()


def _unknown_word(program: str, word: str, words: Sequence[str], options: Sequence[str]) -> UnknownName:
    command = program.removeprefix("stretto ")
    if word.startswith("-"):
        hint = did_you_mean(word.partition("=")[0], options)
        return UnknownName(f"{command} has no option {word!r}; `{program} --help` lists them{hint}")
    # Options take all words that follow them, but for switches, which take none.
    place = next(i for i, given in enumerate(words) if given.endswith(word))
    given = " ".join(words[max(0, place - 1) : place + 1]) if words[place] == word else words[place]
    return UnknownName(
        f"cannot read {given!r}: a switch takes no value; `{program} --help` lists all options"
    )


@dataclasses.dataclass(frozen=True)
class _Words:
    """The value of one option, as the user wrote it."""

    words: Sequence[str]
    kind: Any

    def read(self, option: str) -> Any:
        """Return the value, of the option's type."""
        separator = "," if get_origin(self.kind) is tuple else " "
        text = separator.join(self.words)
        if not self.words or (len(self.words) > 1 and separator == " "):
            raise ConfigError(f"{option} takes one value, found {text or 'none'}")
        try:
            return read_value(text, self.kind, _READERS)
        except ConfigError as error:
            raise ConfigError(f"{option} {text}: {error}") from error


@dataclasses.dataclass(frozen=True)
class _Draft(Generic[ConfigT]):
    """A configuration whose options are known, and not yet read."""

    make: Callable[..., ConfigT]
    values: Mapping[str, Any]
    """By field: words, a draft, or the value of an option that the user left alone."""

    def made(self, prefix: str = "--") -> ConfigT:
        """Read all options and return the configuration."""
        return self.make(**{name: _made(_option(prefix, name), value) for name, value in self.values.items()})

    def options(self, prefix: str = "--") -> Iterator[str]:
        """Yield every option, and beside a switch the one that turns it off."""
        for name, value in self.values.items():
            option = _option(prefix, name)
            if isinstance(value, _Draft):
                yield from value.options(f"{option}.")
            else:
                yield option
            if isinstance(value, bool):
                yield _option(f"{prefix}no-", name)


def _option(prefix: str, field: str) -> str:
    return prefix + field.replace("_", "-")


def _made(option: str, value: Any) -> Any:
    if isinstance(value, _Words):
        return value.read(option)
    if not isinstance(value, _Draft):
        return value
    try:
        return value.made(f"{option}.")
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith("--") else f"{option}: {text}") from error


class _Drafting:
    """Lets tyro look up the fields of a configuration and their docstrings, but returns drafts in its place."""

    def __init__(self) -> None:
        self._asks = False

    def __call__(self, info: "StructTypeInfo") -> "StructConstructorSpec | None":
        """Return how tyro is to make `info.type`; None leaves it to tyro's own rules."""
        from tyro.constructors import ConstructorRegistry, StructConstructorSpec

        if self._asks or not dataclasses.is_dataclass(get_origin(info.type) or info.type):
            return None
        self._asks = True  # the question comes back to this rule, which must not answer it
        spec = ConstructorRegistry.get_struct_spec(info)
        self._asks = False
        if not isinstance(spec, StructConstructorSpec):
            return None
        fields = [
            dataclasses.replace(field, helptext=partial(_in_one_line, field.helptext))
            for field in spec.fields
        ]
        return StructConstructorSpec(
            instantiate=lambda **values: _Draft(spec.instantiate, values), fields=tuple(fields)
        )


def _in_one_line(helptext: str | Callable[[], str | None] | None) -> str:
    return " ".join(((helptext() if callable(helptext) else helptext) or "").split())


def _one_option(info: "PrimitiveTypeInfo") -> "PrimitiveConstructorSpec[Any] | None":
    """Return how tyro is to take an option's words; a switch is left to tyro's own rules."""
    from tyro.constructors import PrimitiveConstructorSpec

    # tyro may write tuple[X, Y] in another way, which would be no key of `_READERS`.
    kind: Any = info.type
    if get_origin(kind) is tuple:
        kind = tuple.__class_getitem__(get_args(kind))
    if kind is bool or dataclasses.is_dataclass(get_origin(kind) or kind):
        return None
    return PrimitiveConstructorSpec(
        nargs="*",  # whatever their number: a wrong one is our error, not tyro's
        metavar=_metavar(kind),
        instance_from_str=lambda words: _Words(words, kind),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [_shown(value)],
    )


def _read_pair(text: str) -> tuple[float, ...]:
    numbers = tuple(read_value(number, float) for number in text.split(","))
    if len(numbers) != 2:
        raise ConfigError(f"expected two numbers, found {len(numbers)}")
    return numbers


_READERS: Mapping[Any, Callable[[str], Any]] = MappingProxyType(
    {
        Clock: parse_clock,
        tuple[str, ...]: split_list,
        tuple[float, float]: _read_pair,
        tuple[Fault, ...]: parse_faults,
        dict[str, float]: parse_learning_rates,
        dict[int, float]: parse_slowness,
    }
)
_METAVARS: Mapping[Any, str] = MappingProxyType(
    {
        NoneType: "None",
        Clock: "MIN,MAX",
        tuple[str, ...]: "A,B,...",
        tuple[float, float]: "A,B",
        tuple[Fault, ...]: "SITE:rank=R:...,...",
        dict[str, float]: "ARM=RATE,...",
        dict[int, float]: "RANK=FACTOR,...",
    }
)


def _metavar(kind: Any) -> str:
    """Return what the help shows for an option's value."""
    if get_origin(kind) in (Union, UnionType):
        return "|".join(map(_metavar, get_args(kind)))
    if get_origin(kind) is Literal:
        return "{" + ",".join(get_args(kind)) + "}"
    # tyro also asks about the words of a Literal, which are no types.
    return _METAVARS.get(kind) or getattr(kind, "__name__", str(kind)).upper()


def _shown(value: Any) -> str:
    """Return a default as the user would write it."""
    if isinstance(value, Clock):
        return f"{value.minimum},{value.maximum}"
    if isinstance(value, Mapping):
        return ",".join(f"{key}={number:g}" for key, number in value.items()) or "none"
    if not isinstance(value, tuple):
        return str(value)
    is_faults = all(isinstance(item, Fault) for item in value)
    return faults_text(value) if value and is_faults else ",".join(map(str, value)) or "none"
