"""Configurations from words of the command line: every field is an option.

argparse finds the options. The types of the fields read their values, so a wrong value raises one of Stretto's one-line
errors, with the closest known name. Nothing here imports PyTorch unless the records do.
"""

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_origin

from stretto.disk import read_whole
from stretto.errors import ConfigError, UnknownName
from stretto.fields import Readers, did_you_mean, field_types, read_value
from stretto.strategies import STRATEGIES

TASK = "--task."
"""Prefix of a recipe's options."""

_LENGTHS = ("--updates", "--samples")
"""Options that set the length of a run; at most one may be given."""

ConfigT = TypeVar("ConfigT")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option of a command."""

    name: str
    """As the user types it: --task.width."""
    kind: Any
    """The field's type."""
    default: Any
    """The field's value without the option."""

    @property
    def is_switch(self) -> bool:
        """Whether the option takes no value."""
        return self.kind is bool

    @property
    def off(self) -> str:
        """The option that switches it off."""
        prefix, dot, last = self.name.removeprefix("--").rpartition(".")
        return f"--{prefix}{dot}no-{last}"

    @property
    def words(self) -> list[str]:
        """The words that would set the default."""
        if self.is_switch:
            return [self.name if self.default else self.off]
        return [self.name, shown(self.default)]


def options_of(record: Any, prefix: str = "--") -> Iterator[Option]:
    """Yield an option for each field of a configuration, and of the records in it."""
    for name, kind in field_types(record.__class__).items():
        value, option = getattr(record, name), _option(prefix, name)
        if _is_group(value):
            yield from options_of(value, f"{option}.")
        else:
            yield Option(name=option, kind=kind, default=value)


def parse_options(
    command: str, words: Sequence[str], configure: Callable[[Any], ConfigT]
) -> tuple[str, ConfigT]:
    """Read "RECIPE [OPTIONS]".

    Args:
        command: Its name, for messages.
        words: The words after it.
        configure: Makes the command's configuration from a recipe's; its fields are the options.

    Returns:
        The recipe's name and the configuration.

    Raises:
        UnknownName: There is no such recipe or option.
        ConfigError: A value cannot be read, or is not allowed.
    """
    from stretto_lab.recipes import RECIPES, recipe

    if not words or words[0].startswith("-"):
        raise UnknownName(
            f"{command} needs a recipe first: {', '.join(RECIPES)}, or your own as FILE.py:FUNCTION"
        )
    name, *options = words
    return name, parse_alone(f"{command} {name}", options, configure(recipe(name)))


def parse_alone(command: str, words: Sequence[str], default: ConfigT) -> ConfigT:
    """Read the options of a command without a recipe; raises as `parse_options`.

    Args:
        command: Its name, for messages.
        words: The words after it.
        default: The configuration without any option.
    """
    options = {option.name: option for option in options_of(default)}
    values, unknown = _values(command, words, options)
    if unknown:
        known = [*options, *(option.off for option in options.values() if option.is_switch)]
        raise _unknown_word(command, unknown[0], words, known)
    is_long = any(
        name in values for name in _LENGTHS
    )  # a length that is given takes the place of the default
    others_lengths = {name: None for name in _LENGTHS if is_long and name in options}
    changed: ConfigT = _changed(default, {**others_lengths, **values})
    return changed


def with_files(words: Sequence[str]) -> list[str]:
    """Return words with each `--config FILE` replaced by the options in the file.

    Raises:
        ConfigError: A file is neither the config.json of a run, nor the output of `--print-config`.
    """
    expanded, left = [], list(words)
    while left:
        name, _, file = left.pop(0).partition("=")
        if name != "--config":
            expanded.append(f"{name}={file}" if file else name)
            continue
        path = Path(file or (left.pop(0) if left else ""))
        try:
            expanded += map(str, json.loads(read_whole(path))["command"]["options"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"--config {path}: expected the config.json of a run, or what --print-config has printed "
                f"({type(error).__name__}: {error})"
            ) from error
    return expanded


def whole_command(default: Any, recipe: str, given: Sequence[str]) -> dict[str, Any]:
    """Return the options as `with_files` reads them: the given ones, and all others that have a value."""
    named = {word.partition("=")[0] for word in given}
    others = [
        word
        for option in options_of(default)
        if not named & {option.name, option.off} and option.default not in (None, (), {})
        for word in option.words
    ]
    return {"command": {"recipe": recipe, "options": [*others, *given]}}


def going_on(before: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return the options of a run with the new options; a new length replaces the old."""
    if not any(word.partition("=")[0] in _LENGTHS for word in given):
        return [*before, *given]
    kept, is_length = [], False
    for word in before:
        is_length = word.partition("=")[0] in _LENGTHS if word.startswith("--") else is_length
        if not is_length:
            kept.append(word)
    return [*kept, *given]


def _values(
    command: str, words: Sequence[str], options: Mapping[str, Option]
) -> tuple[dict[str, Any], list[str]]:
    """Return the values that are given for `options`, by name, and the words that belong to none of them."""
    parser = _Parser(
        prog=f"stretto {command}", add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    for option in options.values():
        if option.is_switch:
            parser.add_argument(option.name, dest=option.name, action="store_true")
            parser.add_argument(option.off, dest=option.name, action="store_false")
        else:
            # Whatever their number: a wrong one is our error, not argparse's.
            parser.add_argument(option.name, dest=option.name, nargs="*")
    found, unknown = parser.parse_known_args(list(words))
    values = {
        name: given if options[name].is_switch else _read(given, options[name])
        for name, given in vars(found).items()
    }
    return values, unknown


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{self.prog} --help` lists the options")


def _unknown_word(command: str, word: str, words: Sequence[str], known: Sequence[str]) -> UnknownName:
    listed = f"`stretto {command} --help-all` lists them"
    if word.startswith("-"):
        hint = _as_setting(word, words, known) or did_you_mean(word.partition("=")[0], known)
        return UnknownName(f"{command} has no option {word!r}; {listed}{hint}")
    # Options take all words that follow them, but for switches, which take none.
    before = words[max(0, words.index(word) - 1)]
    given = word if before == word else f"{before} {word}"
    return UnknownName(f"cannot read {given!r}: a switch takes no value; {listed}")


def _as_setting(word: str, words: Sequence[str], known: Sequence[str]) -> str:
    """Return how to write a strategy's setting, if `word` names one and no field of the task."""
    name, _, value = word.partition("=")
    field = name.lstrip("-").replace("-", "_")
    owner = next((one for one, kind in STRATEGIES.items() if field in field_types(kind)), None)
    option = next((one for one in ("--strategy", "--strategies") if one in known), None)
    if owner is None or option is None or _option(TASK, field) in known:
        return ""
    value = value or next(iter(words[words.index(word) + 1 :]), "...")
    return f"; it is a setting of a strategy, as {option} {owner}:{field}={value}"


def _read(words: Sequence[str], option: Option) -> Any:
    """Return an option's value, read as its type."""
    separator = "," if get_origin(option.kind) is tuple else " "
    text = separator.join(words)
    if not words or (len(words) > 1 and separator == " "):
        raise ConfigError(f"{option.name} takes one value, found {text or 'none'}")
    try:
        return read_value(text, option.kind, _readers())
    except ConfigError as error:
        raise ConfigError(f"{option.name} {text}: {error}") from error


def _changed(record: Any, values: Mapping[str, Any], prefix: str = "--") -> Any:
    """Return `record` with the values that the user has set."""
    changes = {}
    for name in field_types(record.__class__):
        value, option = getattr(record, name), _option(prefix, name)
        if _is_group(value):
            changes[name] = _changed(value, values, f"{option}.")
        elif option in values:
            changes[name] = values[option]
    with named_as_options(record, prefix):
        return dataclasses.replace(record, **changes)


@contextmanager
def named_as_options(record: Any, prefix: str = "--") -> Iterator[None]:
    """Let errors about fields of `record` name the command's options.

    Raises:
        ConfigError: An error of the block, with the options' names.
    """
    try:
        yield
    except ConfigError as error:
        text = _in_options(str(error), record, prefix)
        if text == str(error):
            raise
        raise type(error)(text) from error


def _in_options(text: str, record: Any, prefix: str) -> str:
    """Return a message with the options' names instead of `Options(wire=...)`, `field=value` or `field`."""
    fields = field_types(record.__class__)
    classes = "|".join(kind.__name__ for kind in type(record).__mro__)
    text = re.sub(rf"\b(?:{classes})\(((?:[^()]|\([^()]*\))*)\)", r"\1", text)

    def setting(match: re.Match[str]) -> str:
        name, value = match[1], match[2].strip("'")
        if name not in fields:
            return match[0]
        if fields[name] is bool and value in ("True", "False"):
            return _option(prefix if value == "True" else f"{prefix}no-", name)
        return f"{_option(prefix, name)} {value}"

    text = re.sub(r"(?<![\w:])(\w+)=('[^']*'|\w[\w.+-]*|-?[\d.]+\w*)", setting, text)
    long = "|".join(name for name in fields if "_" in name) or "^$"
    text = re.sub(rf"(?<![-\w.])({long})\b", lambda match: _option(prefix, match[1]), text)
    return f"{prefix}{text}" if text.partition(" ")[0] in fields else text


def _option(prefix: str, field: str) -> str:
    return prefix + field.replace("_", "-")


def _is_group(value: Any) -> bool:
    """Whether each field of a record is an option; other records are read from one word."""
    return dataclasses.is_dataclass(value) and type(value) not in _readers()


def _readers() -> Readers:
    """Return readers for the types that have a text form."""
    if "torch" not in sys.modules:  # then no record has a field of such a type
        return {}
    from stretto.engine import Clock
    from stretto.noise import Noise, parse_noise
    from stretto_lab.faults import Fault, parse_faults
    from stretto_lab.train.arms import parse_clock, split_list
    from stretto_lab.virtual import parse_slowness

    return {
        Clock: parse_clock,
        Noise: parse_noise,
        tuple[str, ...]: split_list,
        tuple[float, float]: _read_pair,
        tuple[int, ...]: lambda text: tuple(read_value(number, int) for number in text.split(",")),
        tuple[Fault, ...]: parse_faults,
        dict[int, float]: parse_slowness,
    }


def _read_pair(text: str) -> tuple[float, ...]:
    numbers = tuple(read_value(number, float) for number in text.split(","))
    if len(numbers) != 2:
        raise ConfigError(f"expected two numbers, found {len(numbers)}")
    return numbers


def shown(value: Any) -> str:
    """Return a value as the user would type it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if type(value).__name__ == "Clock":
        return f"{value.minimum},{value.maximum}"
    if isinstance(value, Mapping):
        return ",".join(f"{key}={number:g}" for key, number in value.items()) or "none"
    return ",".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)
