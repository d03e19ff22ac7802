"""Arms of a comparison: a strategy, its options, and settings of the run for it alone, as one word.

    name[:key=value]...        for example  acco:first=1:wire=bf16  or  wp:clock=1,8:lr=2e-3

A run names its strategy in the same way.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from stretto.engine import Clock
from stretto.errors import ConfigError, UnknownName
from stretto.exchange import Wire, wire_by_name
from stretto.fields import (
    Readers,
    did_you_mean,
    field_types,
    read_settings,
    read_value,
    split_settings,
    unknown_name,
)
from stretto.peers import PEERS
from stretto.strategies import STRATEGIES, Strategy

SETTINGS: Mapping[str, Any] = MappingProxyType(
    {
        **dict.fromkeys(("wire", "changes", "estimates"), Wire),
        **dict.fromkeys(("micro_batches", "ranks_per_node", "bucket_bytes"), int),
        **{"clock": Clock, "clip_norm": float, "lr": float},
    }
)
"""Settings of a run that an arm may have for itself, and their types."""


def parse_clock(text: str) -> Clock:
    """Read "MIN,MAX".

    Raises:
        ConfigError: Anything else.
    """
    match = re.fullmatch(r"(\d+),(\d+)", text.strip())
    if match is None:
        raise ConfigError(f"cannot read the clock {text!r}: expected MIN,MAX micro-batches per round, as 1,8")
    return Clock(minimum=int(match[1]), maximum=int(match[2]))


def split_list(text: str) -> tuple[str, ...]:
    """Cut "ddp,acco:clock=1,8" into two: a comma before a digit belongs to a clock."""
    return tuple(part.strip() for part in re.split(r",(?!\d)", text) if part.strip())


def parse_learning_rates(text: str) -> dict[str, float]:
    """Read "acco=2e-3,wp=1e-3".

    Raises:
        ConfigError: Anything else.
    """
    pairs = [arm.rpartition("=") for arm in split_list(text)]
    try:
        if all(arm for arm, _, _ in pairs):
            return {arm: read_value(rate, float) for arm, _, rate in pairs}
    except ConfigError as error:
        raise ConfigError(f"cannot read the learning rates {text!r}: {error}") from error
    raise ConfigError(f"cannot read the learning rates {text!r}: expected ARM=RATE, as acco=2e-3,wp=1e-3")


def parse_wire(text: str) -> str:
    """Return the name of a wire format.

    Raises:
        UnknownName: No wire format is called so.
    """
    return wire_by_name(text).name


_READERS: Readers = MappingProxyType({Clock: parse_clock, Wire: parse_wire})


@dataclasses.dataclass(frozen=True, slots=True)
class Arm:
    """A strategy and what is set for it alone."""

    text: str
    """As the user wrote it: the arm's name in results."""
    name: str
    """Of the strategy or stock method."""
    options: dict[str, Any]
    """Options of the strategy's own."""
    settings: dict[str, Any]
    """Settings of the run, out of `SETTINGS`."""

    @property
    def is_ours(self) -> bool:
        """Whether this is a strategy of the library, and not a stock method."""
        return self.name in STRATEGIES

    @property
    def overlaps(self) -> bool:
        """Whether it has a communication lane that a clock could wait for."""
        return self.is_ours and STRATEGIES[self.name].overlaps

    def strategy(self) -> Strategy:
        """Return the strategy with its options; only where `is_ours`."""
        return STRATEGIES[self.name](**self.options)


def parse_arm(text: str) -> Arm:
    """Read one arm.

    Raises:
        UnknownName: No such strategy or stock method, or no such setting.
        ConfigError: A value cannot be read, or cannot be.
    """
    name, _ = split_settings(text)
    if name not in STRATEGIES and name not in PEERS:
        raise unknown_name("no strategy is called", name, [*STRATEGIES, *PEERS])
    own = field_types(STRATEGIES[name]) if name in STRATEGIES else {}
    values = read_settings(text, {**own, **SETTINGS, **own}, _READERS)  # its own are named first
    arm = Arm(
        text,
        name,
        options={key: value for key, value in values.items() if key in own},
        settings={key: value for key, value in values.items() if key not in own},
    )
    if arm.is_ours:
        arm.strategy()  # refuses options that cannot be
    return arm


def parse_arms(texts: Sequence[str], learning_rates: Mapping[str, float]) -> list[Arm]:
    """Read all arms; `learning_rates` by arm or strategy are for those that set none of their own.

    Raises:
        UnknownName: No such strategy or setting; or a learning rate for an arm that does not run.
        ConfigError: A value cannot be read or cannot be, or two arms are the same.
    """
    if len(set(texts)) < len(texts):
        raise ConfigError(f"an arm stands twice in {', '.join(texts)}; use repeats to run all of them again")
    arms = [parse_arm(text) for text in texts]
    known = {arm.text for arm in arms} | {arm.name for arm in arms}
    if unknown := sorted(set(learning_rates) - known):
        raise UnknownName(
            f"learning rates for {', '.join(unknown)}, which does not run; there are {', '.join(texts)}"
            f"{did_you_mean(unknown[0], known)}"
        )
    return [_with_default_rate(arm, learning_rates) for arm in arms]


def _with_default_rate(arm: Arm, learning_rates: Mapping[str, float]) -> Arm:
    rate = learning_rates.get(arm.text, learning_rates.get(arm.name))
    if rate is None or "lr" in arm.settings:
        return arm
    return dataclasses.replace(arm, settings={**arm.settings, "lr": rate})
