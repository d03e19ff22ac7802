"""Arms of a comparison: a strategy, its options, and settings of the run for it alone, in one line of text.

name[:key=value]...        for example  acco:first=1:wire=bf16  or  wp:clock=1,8:lr=2e-3
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from stretto.engine import Clock
from stretto.errors import ConfigError, UnknownName
from stretto.peers import PEERS
from stretto.strategies import STRATEGIES, Strategy
from stretto.train.configuration import Job, RunConfig, TaskT


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
    if any(not arm for arm, _, _ in pairs):
        raise ConfigError(f"cannot read the learning rates {text!r}: expected ARM=RATE, as acco=2e-3,wp=1e-3")
    return {arm: _read(float, "learning rate", rate) for arm, _, rate in pairs}


SETTINGS: Mapping[str, Callable[[str], Any]] = MappingProxyType(
    {"wire": str, "clock": parse_clock, "micro_batches": int, "clip_norm": float, "lr": float}
)
"""Settings of a run that an arm may have for itself, and how each is read."""


def parse_switch(text: str) -> bool:
    """Read "on" or "off".

    Raises:
        ConfigError: Anything else.
    """
    if text not in ("on", "off"):
        raise ConfigError(f"cannot read the switch {text!r}: expected on or off")
    return text == "on"


_READERS: Mapping[type, Callable[[str], Any]] = MappingProxyType({float: float, str: str, bool: parse_switch})
"""How a strategy's own option is read, by the type of its default; integers where there is none."""


@dataclasses.dataclass(frozen=True, slots=True)
class Arm:
    """A strategy and what is set for it alone."""

    text: str
    """As the user wrote it: the arm's name in results."""
    name: str
    """Of the strategy or peer."""
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
        """The strategy with its options; only where `is_ours`."""
        return STRATEGIES[self.name](**self.options)

    def configure(self, job: Job[TaskT]) -> RunConfig[TaskT]:
        """Return the run of this arm: all that `job` says of a run, but for what the arm sets itself."""
        names = {field.name for field in dataclasses.fields(RunConfig)} - {"strategy"}
        shared = {
            field.name: getattr(job, field.name) for field in dataclasses.fields(job) if field.name in names
        }
        changes = dict(self.settings)
        if "lr" in changes:
            changes["task"] = _with_rate(job.task, changes.pop("lr"))
        if "micro_batches" in changes:
            changes.setdefault("clock", None)
        if not self.overlaps:
            changes["clock"] = None
        return RunConfig(**{**shared, **changes}, strategy=self.text)


def parse_arm(text: str) -> Arm:
    """Read one arm.

    Raises:
        UnknownName: No strategy, or no such setting.
        ConfigError: A value cannot be read.
    """
    name, *pairs = text.split(":")
    if name not in STRATEGIES and name not in PEERS:
        raise UnknownName(
            f"no strategy is called {name!r}; there are {', '.join(STRATEGIES)}, and to compare with "
            f"{', '.join(PEERS)}"
        )
    # Every strategy is a dataclass of its options, which the type of the mapping cannot say.
    kind: Any = STRATEGIES.get(name)
    own = {} if kind is None else {field.name: field for field in dataclasses.fields(kind) if field.init}
    options: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key in own:
            options[key] = _read(_READERS.get(type(own[key].default), int), key, value)
        elif key in SETTINGS:
            settings[key] = _read(SETTINGS[key], key, value)
        else:
            raise UnknownName(
                f"{text!r}: {name} has no setting {key!r}; there are {', '.join([*own, *SETTINGS])}"
            )
    return Arm(text, name, options, settings)


def parse_arms(texts: Sequence[str], learning_rates: Mapping[str, float]) -> list[Arm]:
    """Read all arms; `learning_rates` by arm or strategy fill in for those without one of their own.

    Raises:
        UnknownName: See `parse_arm`; or a learning rate for an arm that does not run.
        ConfigError: A value cannot be read, or two arms are the same.
    """
    if len(set(texts)) < len(texts):
        raise ConfigError(f"an arm stands twice in {', '.join(texts)}; use repeats to run all of them again")
    arms = [parse_arm(text) for text in texts]
    known = {arm.text for arm in arms} | {arm.name for arm in arms}
    if unknown := sorted(set(learning_rates) - known):
        raise UnknownName(
            f"learning rates for {', '.join(unknown)}, which does not run; there are {', '.join(texts)}"
        )
    return [_with_default_rate(arm, learning_rates) for arm in arms]


def _with_default_rate(arm: Arm, learning_rates: Mapping[str, float]) -> Arm:
    rate = learning_rates.get(arm.text, learning_rates.get(arm.name))
    if rate is None or "lr" in arm.settings:
        return arm
    return dataclasses.replace(arm, settings={**arm.settings, "lr": rate})


def _with_rate(task: TaskT, rate: float) -> TaskT:
    if not dataclasses.is_dataclass(task) or "lr" not in {field.name for field in dataclasses.fields(task)}:
        raise ConfigError(f"{type(task).__name__} has no field lr that an arm could set")
    return dataclasses.replace(task, lr=rate)


def _read(kind: Callable[[str], Any], key: str, value: str) -> Any:
    try:
        return kind(value)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"cannot read {key}={value!r}: {error}") from error
