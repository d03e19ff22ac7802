"""Faults as data, and their injection into a running job, to measure which faults the guards detect."""

from stretto_lab.faults.group import FaultyGroup
from stretto_lab.faults.injector import Application, Injector
from stretto_lab.faults.memory import strike_memory
from stretto_lab.faults.plan import (
    EXTENTS,
    LASTS,
    PATTERNS,
    SITES,
    WIRE_SITES,
    Fault,
    FaultPlan,
    parse_faults,
)

__all__ = [
    "EXTENTS",
    "LASTS",
    "PATTERNS",
    "SITES",
    "WIRE_SITES",
    "Application",
    "Fault",
    "FaultPlan",
    "FaultyGroup",
    "Injector",
    "parse_faults",
    "strike_memory",
]
