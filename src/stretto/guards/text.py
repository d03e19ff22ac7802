"""Guards as words on the command line, such as `standard`, or `rest`, `replica` or `audit:rate=0.02:seed=1`."""

from collections.abc import Sequence
from typing import Literal

from stretto.errors import ConfigError
from stretto.fields import field_types, read_record, split_settings, unknown_name
from stretto.guards import GUARDS, Guard

STANDARD: Literal["standard"] = "standard"


def parse_guards(texts: Sequence[str], seed: int = 0) -> tuple[Guard, ...] | Literal["standard"]:
    """Read guards, whose settings are the fields of their classes, or the one word that stands for all that fit.

    Args:
        texts: One guard each.
        seed: Seed for guards that have none.

    Raises:
        UnknownName: There is no such guard or setting.
        ConfigError: A value cannot be read, or is not allowed.
    """
    for text in texts:
        name, settings = split_settings(text)
        if name not in (*GUARDS, STANDARD):
            raise unknown_name("no guard is called", name, [*GUARDS, STANDARD])
        if name == STANDARD and settings:
            raise ConfigError(f"guards {text}: expected 'standard' without settings; name a guard to set it")
    if STANDARD not in texts:
        return tuple(read_record("guard", _seeded(text, seed), GUARDS) for text in texts)
    if len(texts) > 1:
        raise ConfigError(
            f"guards {','.join(texts)}: expected 'standard' alone, which takes every guard that fits the "
            "strategy except audit; or name each guard"
        )
    return STANDARD


def _seeded(text: str, seed: int) -> str:
    name, settings = split_settings(text)
    draws = "seed" in field_types(GUARDS[name])
    return f"{text}:seed={seed}" if draws and "seed" not in settings else text
