"""A plan as one word of the command line: even:uses=2.5   bernoulli:p=cosine(1,0.25)   ready:pool=8:max_uses=4   auto.

A value may be a schedule: cosine(START,STOP[,UPDATES]), linear(START,STOP[,UPDATES]) or multistep(V0,UPDATE1,V1,...).
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from stretto.echo.measured import Auto
from stretto.echo.plans import Bernoulli, Even, Plan, Ready
from stretto.errors import ConfigError
from stretto.fields import read_record, read_value
from stretto.schedules import Cosine, Linear, MultiStep, Schedule

PLANS: Mapping[str, Callable[..., Plan]] = MappingProxyType(
    {"even": Even, "bernoulli": Bernoulli, "ready": Ready, "auto": Auto}
)
"""Every plan by its name."""

_FORM = re.compile(r"(cosine|linear|multistep)\(([-+.\deE,]+)\)")


def parse_plan(text: str, updates: int | None = None) -> Plan:
    """Read a plan; its settings are the fields of its class.

    Args:
        text: As in the module's first line.
        updates: Of the run: the length of a schedule that names none. None where it is not known.

    Raises:
        UnknownName: No such plan, or the plan has no such setting.
        ConfigError: A value cannot be read, or cannot be.
    """
    plan: Plan = read_record("echo plan", text, PLANS, {Schedule: partial(_read_schedule, updates=updates)})
    return plan


def _read_schedule(text: str, updates: int | None) -> Schedule:
    if "(" not in text:
        return float(read_value(text, float))
    match = _FORM.fullmatch(text.replace(" ", ""))
    if match is None:
        raise ConfigError(
            f"cannot read the schedule {text!r}: expected cosine(START,STOP[,UPDATES]), linear(START,STOP[,UPDATES]) "
            "or multistep(VALUE,UPDATE,VALUE,...)"
        )
    numbers = [float(read_value(number, float)) for number in match[2].split(",")]
    if match[1] == "multistep":
        return MultiStep(tuple(numbers[::2]), tuple(int(step) for step in numbers[1::2]))
    if len(numbers) == 2 and updates is None:
        raise ConfigError(
            f"{text!r} needs its number of updates as a third value: the run's length is not known"
        )
    if len(numbers) not in (2, 3):
        raise ConfigError(f"{text!r}: expected START,STOP or START,STOP,UPDATES, found {len(numbers)} values")
    kind = Cosine if match[1] == "cosine" else Linear
    return kind(numbers[0], numbers[1], int(numbers[2]) if len(numbers) == 3 else int(updates or 1))
