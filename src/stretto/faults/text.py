"""Faults in one line of text: what the command line takes.

    site:rank=R[:key=value]...[,site:...]     masters:rank=1:instant=3:lasts=sticky,gathered-values:rank=0

Settings are the fields of `Fault`; spaces in a site's name may be hyphens.
"""

import dataclasses
from typing import Any

from stretto.errors import ConfigError, UnknownName
from stretto.faults.plan import SITES, Fault

_FIELDS: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(Fault)}
_NUMBERS = {int: int, float: float}
_BY_WORD = {site.replace(" ", "-"): site for site in SITES}


def parse_faults(text: str) -> tuple[Fault, ...]:
    """Read faults; "none" are none.

    Raises:
        UnknownName: No such site, or a fault has no such setting.
        ConfigError: A value cannot be read, or cannot be.
    """
    if text.strip() == "none":
        return ()
    return tuple(_read_fault(part.strip()) for part in text.split(","))


def faults_text(faults: tuple[Fault, ...]) -> str:
    """Return faults as `parse_faults` reads them; settings that are as usual are left out."""
    return ",".join(map(_fault_text, faults)) or "none"


def _read_fault(text: str) -> Fault:
    word, *pairs = text.split(":")
    site = word.replace(" ", "-")
    if site not in _BY_WORD:
        raise UnknownName(f"no site of a fault is called {word!r}; there are {', '.join(_BY_WORD)}")
    settings: dict[str, Any] = {"site": _BY_WORD[site]}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in _FIELDS:
            raise UnknownName(f"{text!r}: a fault has no setting {key!r}; there are {', '.join(_FIELDS)}")
        try:
            settings[key] = _NUMBERS.get(_FIELDS[key], str)(value)
        except ValueError as error:
            raise ConfigError(f"{text!r}: cannot read {key}={value!r}: {error}") from error
    if "rank" not in settings:
        raise ConfigError(f"{text!r}: expected whose memory is damaged, as {word}:rank=1")
    return Fault(**settings)


def _fault_text(fault: Fault) -> str:
    settings = {
        field.name: getattr(fault, field.name)
        for field in dataclasses.fields(Fault)
        if field.name not in ("site", "rank") and getattr(fault, field.name) != field.default
    }
    pairs = {"rank": fault.rank, **settings}.items()
    return ":".join([fault.site.replace(" ", "-"), *(f"{key}={value}" for key, value in pairs)])
