"""Records as tables: the paper's number in brackets after ours."""

from collections.abc import Sequence

from stretto_lab.reproduce.intervals import Interval
from stretto_lab.reproduce.record import Record
from stretto_lab.reproduce.results import CellFound, EffectFound, Found

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""The titles of columns, and rows of cells."""


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose columns are as wide as their widest cell."""
    lines = [list(head), *([*row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]

    def joined(line: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"

    ruler = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([joined(head), ruler, *(joined(row) for row in rows)])


def number(value: float, digits: int) -> str:
    """Return a number with thousands parted, and no sign before a zero."""
    text = f"{value:,.{digits}f}"
    return text.removeprefix("-") if not any(digit in "123456789" for digit in text) else text


def around(found: Interval | None, digits: int) -> str:
    """Return a mean with its interval."""
    if found is None:
        return "none"
    mean = number(found["mean"], digits)
    if "low" not in found:
        return mean
    return f"{mean} ({number(found['low'], digits)} to {number(found['high'], digits)})"


def cell_text(found: CellFound) -> str:
    """Return our mean, and in brackets the paper's number."""
    digits, own = found.cell.measure.digits, found.interval
    text = (
        "not reached"
        if own is None and found.runs
        else "none"
        if own is None
        else number(own["mean"], digits)
    )
    if own is not None and len(found.values) < found.runs:
        text += f" in {len(found.values)} of {found.runs}"
    return text if found.cell.paper is None else f"{text} ({number(found.cell.paper, digits)})"


def cells_table(found: Found) -> Table:
    """Return a record's own table: rows and columns as in the paper."""
    columns = list(dict.fromkeys(column for row in found.cells.values() for column in row))
    rows = [
        [name, *(cell_text(row[column]) if column in row else "" for column in columns)]
        for name, row in found.cells.items()
    ]
    return ["", *(_titled(found.record, column) for column in columns)], rows


def _titled(record: Record, column: str) -> str:
    units = {row[column].measure.unit for row in record.cells.values() if column in row}
    return f"{column}, {units.pop()}" if len(units) == 1 else column


def effects_table(found: Found) -> Table:
    """Return what decides the verdict: every effect with its interval, what the paper says, and what that gives."""
    rows = [
        [one.effect.says, around(one.interval, one.effect.digits), said(one), one.verdict]
        for one in found.effects
    ]
    return ["what is compared", "here, 95 %", "paper", "verdict"], rows


def said(one: EffectFound) -> str:
    """Return what the paper says of an effect: its number, or else its limits in words."""
    limits, digits = one.effect.limits, one.effect.digits
    if one.paper is not None:
        return f"{'up to ' if limits.is_best else ''}{number(one.paper, digits)}"
    least, most = limits.least, limits.most
    if least == float("-inf"):
        return f"at most {number(most, digits)}"
    return f"at least {number(least, digits)}" + (
        "" if most == float("inf") else f", at most {number(most, digits)}"
    )


def told(record: Record) -> str:
    """Return the paper's number for a list: as it is told, or that of the first effect that has one, and what it is."""
    if record.told:
        return record.told
    for one in record.effects:
        if (value := one.of_paper(record)) is not None:
            return f"{number(value, one.digits)}: {one.says}"
    return "in words"
