"""A plan in one line of text: what the command line takes.

    name[:key=value]...     even:uses=2.5   bernoulli:p=cosine(1,0.25)   ready:pool=8:max_uses=4   auto

A value may be a schedule: cosine(START,STOP[,STEPS]), linear(START,STOP[,STEPS]), multistep(V0,STEP1,V1,...).
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from stretto.echo.measured import Auto
from stretto.echo.plans import Bernoulli, Even, Plan, Ready
from stretto.errors import ConfigError, UnknownName
from stretto.schedules import Cosine, Linear, MultiStep, Schedule

PLANS: Mapping[str, Callable[..., Plan]] = MappingProxyType(
    {"even": Even, "bernoulli": Bernoulli, "ready": Ready, "auto": Auto}
)
"""Name on the command line to plan."""

_SCHEDULED = ("uses", "p")
_WHOLE = ("pool", "max_uses", "window", "skip")


def parse_plan(text: str, steps: int | None = None) -> Plan:
    """Read a plan.

    Args:
        text: See the module's words.
        steps: Batches that one rank will hand out, where that is known: the length of a schedule that says none.

    Raises:
        UnknownName: No such plan, or the plan has no such setting.
        ConfigError: A value cannot be read, or cannot be.
    """
    name, *pairs = text.split(":")
    if name not in PLANS:
        raise UnknownName(f"no echo plan is called {name!r}; there are {', '.join(PLANS)}")
    kind: Any = PLANS[name]
    known = [field.name for field in dataclasses.fields(kind)]
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in known:
            raise UnknownName(f"{text!r}: {name} has no setting {key!r}; there are {', '.join(known)}")
        settings[key] = _read(key, value, steps)
    plan: Plan = kind(**settings)
    return plan


def _read(key: str, value: str, steps: int | None) -> Any:
    if key in _SCHEDULED and "(" in value:
        return _read_schedule(value, steps)
    try:
        return int(value) if key in _WHOLE else float(value)
    except ValueError as error:
        raise ConfigError(f"cannot read {key}={value!r}: {error}") from error


def _read_schedule(text: str, steps: int | None) -> Schedule:
    match = re.fullmatch(r"(cosine|linear|multistep)\(([-+.\deE,]+)\)", text.replace(" ", ""))
    if match is None:
        raise ConfigError(
            f"cannot read the schedule {text!r}: expected cosine(START,STOP[,STEPS]), linear(START,STOP[,STEPS]) or "
            "multistep(VALUE,STEP,VALUE,...)"
        )
    try:
        numbers = [float(number) for number in match[2].split(",")]
    except ValueError as error:
        raise ConfigError(f"cannot read the schedule {text!r}: {error}") from error
    if match[1] == "multistep":
        return MultiStep(tuple(numbers[::2]), tuple(int(step) for step in numbers[1::2]))
    if len(numbers) == 2 and steps is None:
        raise ConfigError(
            f"{text!r} needs its number of steps as a third value: the run's length is not known"
        )
    if len(numbers) not in (2, 3):
        raise ConfigError(f"{text!r}: expected START,STOP or START,STOP,STEPS, found {len(numbers)} values")
    kind = Cosine if match[1] == "cosine" else Linear
    length = int(numbers[2]) if len(numbers) == 3 else int(steps or 1)
    return kind(numbers[0], numbers[1], length)
