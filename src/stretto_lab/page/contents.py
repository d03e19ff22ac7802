"""What a page shows: runs with their curves and events, tables, and what is missing."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto_lab.page.records import mapping, number
from stretto_lab.page.times import UpdateTime

Column = NDArray[np.float64]

UNKNOWN = "-"
"""Stands for a number that is missing."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that was found, done or left out in a run."""

    step: float
    """The update, counted from 1."""
    kind: str
    """fault, which was done on purpose; incident, restart or skipped."""
    text: str
    """What, where and by whom."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run, or one arm of a comparison."""

    name: str
    columns: dict[str, Column]
    """Numbers of every update by the name of their field, NaN where one is missing; empty for an arm."""
    axes: dict[str, Column]
    """Where every update lies, by axis: updates, samples of all ranks, those at their first use, training seconds,
    bytes that rank 0 sent."""
    evaluations: Column
    """`(count, 2)`: step and held-out loss."""
    evaluation_axes: dict[str, Column]
    events: Sequence[Event]
    time: UpdateTime | None
    """Where the time of an average update went."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of text under headings."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """What a folder holds, as far as it can be read."""

    path: Path
    name: str
    facts: dict[str, str]
    """What ran, in the order in which it is shown."""
    runs: Sequence[Run]
    tables: Sequence[Table] = ()
    gaps: list[str] = dataclasses.field(default_factory=list)
    """What could not be read."""


def formatted(value: float, pattern: str) -> str:
    """Return a number as a pattern of `str.format` writes it, or the sign for one that is missing."""
    return pattern.format(value) if np.isfinite(value) else UNKNOWN


def read_evaluations(records: Iterable[dict[str, Any]]) -> Column:
    """Return one row per evaluation: step, held-out loss and training seconds."""
    rows = [
        [number(one.get(name)) for name in ("step", "heldout_loss", "training_seconds")] for one in records
    ]
    return np.array(rows, dtype=float).reshape(-1, 3)


def unit_of(recorded: dict[str, Any]) -> str:
    """Return the unit of losses that is recorded for a run; empty where none is."""
    return str(recorded.get("loss_unit") or "")


def describe_machine(machine: dict[str, Any]) -> dict[str, str]:
    """Return processor and versions, by label, as `describe_environment` of a run has written them."""
    if not machine:
        return {}
    processor = f"{machine.get('processor')}, {machine.get('cores')} cores"
    device = f"{machine['cuda']}; {processor}" if machine.get("cuda") else processor
    commit = f", commit {machine['commit']}" if machine.get("commit") else ""
    return {
        "machine": f"{device}; {machine.get('system')}",
        "versions": f"PyTorch {machine.get('torch')}, Python {machine.get('python')}{commit}",
    }


def describe_task(task: object) -> str:
    """Return the settings of a recipe in one line; what is not set is left out, and so are the records in it."""
    settings = [
        f"{name} {value}"
        for name, value in mapping(task).items()
        if value is not None
        and not any(isinstance(one, dict) for one in (value if isinstance(value, list) else [value]))
    ]
    return ", ".join(settings) or "unknown"
