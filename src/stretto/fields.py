"""Fields of option records: checked against their types, and read from text.

A record is a frozen dataclass of options. On the command line one record is one word:

    name[:key=value]...      acco:first=1:wire=bf16     audit:rate=0.02     ready:pool=8

The keys are the record's fields, and each value is read by its field's type. A number that comes first is the value of
the first field: average:4 is average:every=4. The same types are checked when a program makes the record, because many
programs run without a type checker.
"""

import contextlib
import dataclasses
import difflib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from stretto.errors import ConfigError, UnknownName

Readers = Mapping[Any, Callable[[str], Any]]
"""By type: readers of types that have their own text form."""

_NO_READERS: Readers = MappingProxyType({})
_SHOWN_CHARACTERS = 80


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'skip'?" if one of `known` is close to `word`, ignoring case, and otherwise ""."""
    by_text = {one.lower(): one for one in known}
    close = difflib.get_close_matches(word.lower(), by_text, n=1)
    return f"; did you mean {by_text[close[0]]!r}?" if close else ""


def unknown_name(sentence: str, name: str, known: Collection[str]) -> UnknownName:
    """Return the error that lists the existing names, and the closest one.

    Args:
        sentence: The words before the name, such as "no guard is called".
        name: The name that the user wrote.
        known: All existing names.
    """
    listed = ", ".join(known) or "none"
    return UnknownName(f"{sentence} {name!r}; there are {listed}{did_you_mean(name, known)}")


@functools.cache
def field_types(kind: type) -> Mapping[str, Any]:
    """Return the type of every field that the constructor of a record accepts, in order; strings are resolved."""
    hints = get_type_hints(kind)
    return MappingProxyType(
        {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}
    )


def check_fields(record: Any) -> None:
    """Raise unless every field holds a value of its type; the first line of a record's `__post_init__`.

    An integer is accepted as a float. A bool is not accepted as a number, nor a list as a tuple.

    Raises:
        ConfigError: A value has another type; the message names the record, the field, the found and the expected
            value, and the closest word.
    """
    for name, kind in field_types(record.__class__).items():
        value = getattr(record, name)
        if not _fits(value, kind):
            hint = did_you_mean(value, _words(kind)) if isinstance(value, str) else ""
            raise ConfigError(
                f"{type(record).__name__}({name}={shown(value)}): expected {_described(_members(kind))}{hint}"
            )


def check_at_least(record: Any, **minima: float) -> None:
    """Raise unless fields are None or at least the minimum given for them; NaN is below every minimum.

    Raises:
        ConfigError: A value is below its minimum; the message names the field.
    """
    for name, minimum in minima.items():
        found = getattr(record, name)
        if found is not None and not found >= minimum:
            raise ConfigError(f"{name} must be at least {minimum}, found {found}")


def split_settings(text: str) -> tuple[str, dict[str, str]]:
    """Cut "name:key=value:key=value" into the name and the values by key, all still text."""
    name, *pairs = text.strip().split(":")
    return name, {key: value for key, _, value in (pair.partition("=") for pair in pairs)}


def named_settings(text: str, kinds: Iterable[str]) -> dict[str, str]:
    """Return the values by key, as `split_settings` does; a number without a key belongs to the first of `kinds`.

    Raises:
        ConfigError: That field also has a value under its name.
    """
    _, settings = split_settings(text)
    number, key = next(iter(settings), ""), next(iter(kinds), "")
    if not number[:1].isdigit():
        return settings
    if key in settings:
        raise ConfigError(
            f"{text!r}: {number} and {key}={settings[key]}: expected one of them; remove the other"
        )
    return {key: number, **{other: value for other, value in settings.items() if other != number}}


def read_settings(text: str, kinds: Mapping[str, Any], readers: Readers = _NO_READERS) -> dict[str, Any]:
    """Return the values that "name:key=value..." sets, by key.

    Args:
        text: The text of one record; its name is ignored.
        kinds: The existing keys, and the type of each.
        readers: Readers of types with their own text form.

    Raises:
        UnknownName: A key does not exist.
        ConfigError: A value cannot be read.
    """
    name, _ = split_settings(text)
    values = {}
    for key, value in named_settings(text, kinds).items():
        if key not in kinds:
            raise unknown_name(f"{text!r}: {name} has no setting", key, kinds)
        try:
            values[key] = read_value(value, kinds[key], readers)
        except ConfigError as error:
            raise ConfigError(f"{text!r}: cannot read {key}={value!r}: {error}") from error
    return values


def read_record(what: str, text: str, kinds: Mapping[str, Any], readers: Readers = _NO_READERS) -> Any:
    """Return the record that "name:key=value..." describes.

    Args:
        what: The kind of record, for messages: "guard".
        text: The user's text.
        kinds: The existing records, by name.
        readers: Readers of types with their own text form.

    Raises:
        UnknownName: The name or a key does not exist.
        ConfigError: A value cannot be read, or is not allowed.
    """
    name, _ = split_settings(text)
    if name not in kinds:
        raise unknown_name(f"no {what} is called", name, kinds)
    return kinds[name](**read_settings(text, field_types(kinds[name]), readers))


def read_value(text: str, kind: Any, readers: Readers = _NO_READERS) -> Any:
    """Return the value of type `kind` that `text` describes.

    A bool is "on" or "off", None is "None". In a union, the first type that can read the text wins.

    Args:
        text: The user's text.
        kind: The field's type: None, bool, int, float, str, Literal, a union of these, or a type with a reader.
        readers: Readers of types with their own text form.

    Raises:
        ConfigError: The text cannot be read; the message names the expected values.
    """
    members = (kind,) if kind in readers else _members(kind)
    for member in members:
        if member in readers:
            return readers[member](text)
        if get_origin(member) is Literal and text in get_args(member):
            return text
        if member in _READERS:
            with contextlib.suppress(ValueError, KeyError):
                return _READERS[member](text)
    readable = [member for member in members if member in _READERS or get_origin(member) is Literal]
    raise ConfigError(f"expected {_described(readable, _TEXT_NAMES)}{did_you_mean(text, _words(kind))}")


_READERS: Readers = MappingProxyType(
    {
        NoneType: {"None": None}.__getitem__,
        bool: {"on": True, "off": False}.__getitem__,
        int: int,
        float: float,
        str: str,
    }
)
_NAMES = {NoneType: "None", bool: "True or False", int: "an integer", float: "a number", str: "a string"}
_TEXT_NAMES = {**_NAMES, bool: "on or off"}


def _members(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union, None first; for another type, only that type."""
    if get_origin(kind) not in (Union, UnionType):
        return (kind,)
    return tuple(sorted(get_args(kind), key=lambda member: member is not NoneType))


def _words(kind: Any) -> list[str]:
    """Return the words that a field of this type accepts."""
    literals = [member for member in _members(kind) if get_origin(member) is Literal]
    return [str(word) for literal in literals for word in get_args(literal)]


def _described(members: Sequence[Any], names: Mapping[Any, str] = MappingProxyType(_NAMES)) -> str:
    """Describe the values that a field of these types accepts; None comes last."""
    return " or ".join(_name(member, names) for member in reversed(members))


def _name(kind: Any, names: Mapping[Any, str]) -> str:
    origin, items = get_origin(kind) or kind, get_args(kind)
    if kind in names:
        return names[kind]
    if origin is Literal:
        return f"one of {', '.join(map(str, items))}"
    if origin is Callable:
        return "a function"
    if isinstance(kind, TypeVar) and kind.__bound__ is not None:
        return _name(kind.__bound__, names)
    held = ", ".join("..." if item is ... else item.__name__ for item in items)
    return f"a {origin.__name__}[{held}]" if items else f"an instance of {origin.__name__}"


def check_callable(given: object, call: str, what: str) -> None:
    """Raise unless an argument can be called.

    Raises:
        ConfigError: It cannot; the message names the expected values.
    """
    if not callable(given):
        raise ConfigError(f"{call}: expected {what}, found {shown(given)}")


def shown(value: object) -> str:
    """Return a value as messages show it: in one line, shortened if it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def is_count(value: object, minimum: int) -> bool:
    """Return whether `value` is an int of at least `minimum`; a bool is not accepted."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _fits(value: Any, kind: Any) -> bool:
    """Return whether `value` has the annotated type."""
    if kind is Any:
        return True
    if isinstance(kind, TypeVar):
        return kind.__bound__ is None or _fits(value, kind.__bound__)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    origin = get_origin(kind) or kind
    return isinstance(value, origin) if origin not in _FITS else _FITS[origin](value, get_args(kind))


def _fits_literal(value: Any, words: tuple[Any, ...]) -> bool:
    return any(value == word and type(value) is type(word) for word in words)


def _fits_union(value: Any, members: tuple[Any, ...]) -> bool:
    return any(_fits(value, member) for member in members)


def _fits_tuple(value: Any, kinds: tuple[Any, ...]) -> bool:
    if not isinstance(value, tuple):
        return False
    if kinds[1:] == (...,):
        return all(_fits(item, kinds[0]) for item in value)
    return len(value) == len(kinds) and all(map(_fits, value, kinds))


def _fits_mapping(value: Any, kinds: tuple[Any, ...]) -> bool:
    return isinstance(value, Mapping) and all(
        _fits(key, kinds[0]) and _fits(item, kinds[1]) for key, item in value.items()
    )


def _fits_callable(value: Any, _: tuple[Any, ...]) -> bool:
    return callable(value)


_FITS: Mapping[Any, Callable[[Any, tuple[Any, ...]], bool]] = MappingProxyType(
    {
        Literal: _fits_literal,
        Union: _fits_union,
        UnionType: _fits_union,
        tuple: _fits_tuple,
        dict: _fits_mapping,
        Mapping: _fits_mapping,
        Callable: _fits_callable,
    }
)
