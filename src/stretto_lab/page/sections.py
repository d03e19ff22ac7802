"""The sections of the page, one function for each: text, tables, and the places where charts are drawn.

Whatever comes from a folder passes `text`.
"""

import html
from collections.abc import Iterator, Sequence

import numpy as np

from stretto.terminal import printable
from stretto_lab.page.contents import UNKNOWN, Contents, Run, Table, formatted

MOST_ROWS = 300
"""Of a table."""
MOST_LETTERS = 2000
"""Of one text from a folder."""


def text(value: str) -> str:
    """Return text from a folder as text of the page."""
    shown = value if len(value) <= MOST_LETTERS else value[:MOST_LETTERS] + "…"
    return html.escape(printable(shown))


def sections(folders: Sequence[Contents], runs: Sequence[Run]) -> Iterator[str]:
    """Yield the sections of the page, in their order.

    Args:
        folders: What is shown.
        runs: Those of all folders whose curves are drawn.
    """
    yield from (_about(folder, "What ran" if len(folders) == 1 else folder.name) for folder in folders)
    if any(len(run.evaluations) or run.columns for run in runs):
        yield _loss(sum(len(folder.runs) for folder in folders) - len(runs))
    yield from _events(runs)
    yield from _time(runs)


def _section(title: str, *parts: str) -> str:
    return "\n".join([f"<section><h2>{text(title)}</h2>", *parts, "</section>"])


def _chart(name: str, label: str, *, small: bool = False) -> str:
    size = "chart small" if small else "chart"
    return f'<div class="{size}" id="{name}" role="group" aria-label="{html.escape(label)}"></div>'


def _table(table: Table) -> str:
    """Return a table; columns of numbers are aligned right."""
    rows = table.rows[:MOST_ROWS]
    width = len(table.headings)
    is_number = [bool(rows) and all(_is_number(row[column]) for row in rows) for column in range(width)]
    marks = [" class=number" if found else "" for found in is_number]
    head = "".join(f"<th{mark}>{text(one)}</th>" for mark, one in zip(marks, table.headings, strict=True))
    body = "\n".join(
        "<tr>"
        + "".join(f"<td{mark}>{text(cell)}</td>" for mark, cell in zip(marks, row, strict=True))
        + "</tr>"
        for row in rows
    )
    more = len(table.rows) - len(rows)
    return (
        (f"<h3>{text(table.title)}</h3>\n" if table.title else "")
        + f"<div class=scroll tabindex=0><table><thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody></table></div>" + (f"<p class=note>and {more:,} more</p>" if more else "")
    )


def _is_number(cell: str) -> bool:
    return cell.strip(" %×").replace(",", "").replace(".", "").replace("-", "").isdigit() or cell == UNKNOWN


def _about(folder: Contents, title: str) -> str:
    facts = "\n".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in folder.facts.items())
    gaps = "\n".join(f"<li>{text(gap)}</li>" for gap in folder.gaps)
    tables = [_table(table) for table in folder.tables if table.rows]
    missing = f"<ul class=gaps>\n{gaps}\n</ul>" if gaps else ""
    return _section(title, f"<dl>{facts}</dl>", missing, *tables)


def _loss(num_hidden: int) -> str:
    axes = {
        "updates": "committed updates",
        "samples": "samples, echoes counted",
        "loads": "samples loaded",
        "seconds": "seconds of training",
        "bytes": "bytes sent",
    }
    options = "".join(f'<option value="{name}">{label}</option>' for name, label in axes.items())
    hidden = f"<p class=note>{num_hidden:,} more runs are not drawn.</p>" if num_hidden else ""
    return _section(
        "Loss",
        hidden,
        f"<div class=controls><label for=axis>against</label><select id=axis>{options}</select>"
        "<label><input type=checkbox id=logarithmic> logarithmic</label></div>",
        _chart("loss", "training and held-out loss of every run"),
    )


def _events(runs: Sequence[Run]) -> Iterator[str]:
    rows = [
        [run.name, UNKNOWN if np.isnan(event.step) else f"{event.step:,.0f}", event.kind, event.text]
        for run in runs
        for event in run.events
    ]
    if rows:
        table = Table(
            title="", headings=("run", "update", "what", "where, by whom, and what became of it"), rows=rows
        )
        yield _section("Faults, verdicts and repairs", _table(table))


def _time(runs: Sequence[Run]) -> Iterator[str]:
    rows = []
    for run in runs:
        if run.time is not None:
            time = run.time
            parts = (time.seconds, time.compute, time.exposed, time.data, time.lane)
            cells = [formatted(1000 * part, "{:,.2f}") for part in parts]
            rows.append([run.name, *cells, f"{time.updates:,}"])
    if not rows:
        return
    headings = ("run", "update", "compute", "exposed", "data", "lane busy", "updates")
    note = (
        "An average update of rank 0 in milliseconds, without evaluations and checkpoints; of a run also without its "
        "first updates, which are slower. Compute is all that is not waiting. "
        "Stock methods cannot tell their parts."
    )
    yield _section(
        "Where an update's time goes",
        f"<p class=note>{note}</p>",
        _chart("time", "compute, exposed communication and waiting for data", small=True),
        _table(Table(title="", headings=headings, rows=rows)),
    )
