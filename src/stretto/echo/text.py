"""A plan as one word of the command line: even:uses=2.5   bernoulli:p=cosine(1,0.25)   ready:pool=8:max_uses=4   auto.

A value may be a schedule, as `stretto.schedules` reads it.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from stretto.echo.measured import Auto
from stretto.echo.plans import Bernoulli, Even, Plan, Ready
from stretto.fields import read_record
from stretto.schedules import Length, Schedule, over, parse_schedule

PLANS: Mapping[str, Callable[..., Plan]] = MappingProxyType(
    {"even": Even, "bernoulli": Bernoulli, "ready": Ready, "auto": Auto}
)
"""Every plan by its name."""


def plan_text(plan: Any) -> str:
    """Return a plan of numbers as `parse_plan` reads it; default settings are omitted."""
    name = next(name for name, kind in PLANS.items() if kind is type(plan))
    settings = {
        one.name: getattr(plan, one.name) for one in fields(plan) if getattr(plan, one.name) != one.default
    }
    return ":".join([name, *(f"{field}={value}" for field, value in settings.items())])


def parse_plan(text: str, updates: Length | None = None) -> Plan:
    """Read a plan; its settings are the fields of its class.

    Args:
        text: The text, as in the module's first line.
        updates: Length of the run, for a schedule that has none. None if it is not known.

    Raises:
        UnknownName: No such plan, or the plan has no such setting.
        ConfigError: A value cannot be read, or is not allowed; or a schedule has no length.
    """
    plan: Plan = read_record(
        "echo plan", text, PLANS, {Schedule: lambda word: over(parse_schedule(word), updates)}
    )
    return plan
