"""A guard in one line of text: what the command line takes.

name[:key=value]...     rest   replica   audit:rate=0.02:seed=1
"""

import dataclasses
from typing import Any

from stretto.errors import ConfigError, UnknownName
from stretto.guards import GUARDS, Guard


def parse_guard(text: str) -> Guard:
    """Read a guard; its settings are the fields of its class.

    Raises:
        UnknownName: No such guard, or the guard has no such setting.
        ConfigError: A value cannot be read, or cannot be.
    """
    name, *pairs = text.split(":")
    if name not in GUARDS:
        raise UnknownName(f"no guard is called {name!r}; there are {', '.join(GUARDS)}")
    # Every guard is a dataclass of its options, which the type of the mapping cannot say.
    kind: Any = GUARDS[name]
    known: dict[str, Any] = {field.name: type(field.default) for field in dataclasses.fields(kind)}
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in known:
            raise UnknownName(
                f"{text!r}: {name} has no setting {key!r}; there are {', '.join(known) or 'none'}"
            )
        try:
            settings[key] = _SWITCH[value] if known[key] is bool else known[key](value)
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{text!r}: cannot read {key}={value!r} as {known[key].__name__}") from error
    guard: Guard = kind(**settings)
    return guard


_SWITCH = {"on": True, "off": False}
