"""Arms of a comparison: a strategy, its options, and settings of the run for it alone, as one word.

    name[:key=value]...        for example  acco:first=1:wire=bf16  or  wp:clock=1,8:lr=2e-3  or  average:4

A run names its strategy in the same way. In a comparison an arm can also be your own method, called like a class of
`stretto_lab.peers`: path/to/file.py:NAME[:key=value]...
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from stretto.engine import Clock, Options
from stretto.errors import ConfigError
from stretto.exchange import Wire, wire_by_name
from stretto.fields import (
    Readers,
    field_types,
    named_settings,
    read_settings,
    split_settings,
    unknown_name,
)
from stretto.noise import Noise, parse_noise
from stretto.schedules import Ramp, Schedule, parse_schedule
from stretto.strategies import STRATEGIES, Strategy
from stretto.strategies.ledger import ledger_of
from stretto_lab.peers import PEERS, Peer, options_of
from stretto_lab.recipes import imported

SETTINGS: Mapping[str, Any] = MappingProxyType(
    {
        **dict.fromkeys(("wire", "changes"), Wire),
        **dict.fromkeys(("micro_batches", "ranks_per_node", "bucket_bytes"), int),
        **{"clock": Clock, "clip_norm": float, "lr": float},
        "noise": field_types(Options)["noise"],
    }
)
"""Settings of a run that an arm may set for itself, and their types."""
AUTO = "auto"
"""The strategy of `train` that stands for the choice of `stretto plan`."""
_OF_PEERS = ("micro_batches", "clip_norm", "lr")
"""Settings that a stock method may set for itself."""
_PLACE = re.compile(r"[^:]*\.py:(\w+)")
"""Place of a user's own method."""


def parse_clock(text: str) -> Clock:
    """Read "MIN,MAX".

    Raises:
        ConfigError: The text has another form.
    """
    match = re.fullmatch(r"(\d+),(\d+)", text.strip())
    if match is None:
        raise ConfigError(f"cannot read the clock {text!r}: expected MIN,MAX micro-batches per round, as 1,8")
    return Clock(minimum=int(match[1]), maximum=int(match[2]))


def split_list(text: str) -> tuple[str, ...]:
    """Cut "ddp,acco:clock=1,8" into two: a comma before a digit belongs to a clock."""
    return tuple(part.strip() for part in re.split(r",(?!\d)", text) if part.strip())


def parse_wire(text: str) -> str:
    """Return the name of a wire format.

    Raises:
        UnknownName: There is no such wire format.
    """
    return wire_by_name(text).name


_READERS: Readers = MappingProxyType(
    {Clock: parse_clock, Wire: parse_wire, Schedule: parse_schedule, Noise: parse_noise}
)


@dataclasses.dataclass(frozen=True, slots=True)
class Arm:
    """A strategy and its own settings."""

    text: str
    """The arm as the user typed it; results use it as the arm's name."""
    name: str
    """Name of the strategy or stock method."""
    options: dict[str, Any]
    """Options of the strategy or the stock method."""
    settings: dict[str, Any]
    """Settings of the run, among those in `SETTINGS`."""

    @property
    def is_ours(self) -> bool:
        """Whether this is a strategy of the library, and not a stock method."""
        return self.name in STRATEGIES

    @property
    def wire(self) -> str:
        """The wire that the arm sets, or else the default."""
        return str(self.settings.get("wire", "fp32"))

    @property
    def overlaps(self) -> bool:
        """Whether it has a communication lane for which a clock could wait."""
        return self.is_ours and STRATEGIES[self.name].overlaps

    @property
    def is_by_node(self) -> bool:
        return ledger_of(self.strategy()).by_node

    @property
    def sends_changes(self) -> bool:
        """Whether it publishes parameters in a format for changes; see `Ledger.sends_changes`."""
        return self.is_ours and ledger_of(self.strategy()).sends_changes

    def strategy(self) -> Strategy:
        """Return the strategy with its options, without a run; only if `is_ours`.

        A rate that changes during a run is replaced by its mean.
        """
        return STRATEGIES[self.name](**{key: _without_run(value) for key, value in self.options.items()})

    @property
    def own_text(self) -> str:
        """The text of the arm without settings of the run."""
        parts = self.text.split(":")
        return ":".join(part for part in parts if part.partition("=")[0] not in self.settings)

    @property
    def resolved(self) -> str:
        """The text with every option of the strategy; options that are None, and seeds, are skipped."""
        record = self.strategy() if self.is_ours else options_of(peer_of(self.name))(**self.options)
        own = field_types(record.__class__)
        values = {name: getattr(record, name) for name in own}
        texts = {
            name: ("off", "on")[value] if isinstance(value, bool) else str(value)
            for name, value in values.items()
            if value is not None and name != "seed"
        }
        texts |= named_settings(_PLACE.sub(r"\1", self.text), [*own, *SETTINGS])
        return ":".join([self.name, *(f"{name}={text}" for name, text in texts.items())])


def _without_run(value: Any) -> Any:
    if isinstance(value, Ramp) and value.steps is None:
        return (value.start + value.stop) / 2
    return value


def parse_arm(text: str) -> Arm:
    """Read one arm.

    Raises:
        UnknownName: There is no such strategy, stock method or setting.
        ConfigError: A value cannot be read, or is not allowed.
    """
    place = _PLACE.match(text.strip())
    name = place[0] if place else split_settings(text)[0]
    if name == AUTO:
        raise ConfigError(
            f"{text!r}: auto takes no settings, and only train knows it: expected stretto train --strategy "
            "auto, or the name of a strategy"
        )
    own = field_types(STRATEGIES[name] if name in STRATEGIES else options_of(peer_of(name)))
    settings = SETTINGS if name in STRATEGIES else {key: SETTINGS[key] for key in _OF_PEERS}
    values = read_settings(
        _PLACE.sub(r"\1", text.strip()), {**own, **settings, **own}, _READERS
    )  # its own are named first
    arm = Arm(
        text,
        name,
        options={key: value for key, value in values.items() if key in own},
        settings={key: value for key, value in values.items() if key not in own},
    )
    if arm.is_ours:
        arm.strategy()  # refuses options that cannot be
    else:
        options_of(peer_of(name))(**arm.options)
    return arm


def peer_of(name: str) -> Callable[..., Peer]:
    """Return the function that makes the handle of a stock method, or of a user's own method.

    Raises:
        UnknownName: There is no such method, file or name in it.
        ConfigError: The file cannot be imported.
    """
    if _PLACE.fullmatch(name):
        found: Callable[..., Peer] = imported(name, "arm")
        return found
    if name not in PEERS:
        raise unknown_name("no strategy is called", name, [*STRATEGIES, *PEERS, "FILE.py:NAME"])
    return PEERS[name]


def parse_arms(texts: Sequence[str]) -> list[Arm]:
    """Read all arms.

    Raises:
        UnknownName: There is no such strategy or setting.
        ConfigError: A value cannot be read or is not allowed, or two arms are equal.
    """
    if len(set(texts)) < len(texts):
        raise ConfigError(f"an arm is twice in {', '.join(texts)}; use repeats to run all of them again")
    return [parse_arm(text) for text in texts]
