"""The page: one HTML file with everything in it, which opens offline and runs nothing but its own two scripts.

What run folders hold is text or numbers: text is escaped where it is put into the page, numbers are JSON in an element
that no browser runs. A content security policy names the two scripts by their digests and forbids all else, also every
request.
"""

import base64
import hashlib
import html
import json
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from stretto.disk import replace_file
from stretto.errors import MissingExtra
from stretto.page.contents import UNKNOWN, Contents, Run, Table
from stretto.page.curves import curves, memory, timeline
from stretto.page.traces import MOST_RANKS, ORDER, RankTimes, RankTrace, Stretch, rank_times, stretches
from stretto.terminal import printable

MOST_RUNS = 40
"""Whose curves are drawn."""
MOST_ROWS = 300
"""Of a table."""
_TEXT = 2000
"""Most characters of one text from a folder."""


def write_page(
    folders: Sequence[Contents],
    traces: Sequence[Sequence[RankTrace]],
    out: Path,
    chosen: tuple[int, int] | None = None,
) -> None:
    """Write the page of what some folders hold.

    Args:
        folders: In the order of the page.
        traces: Of each folder; empty where it has none.
        out: The file.
        chosen: First and last update that timelines show, beside those that they show anyway.

    Raises:
        MissingExtra: plotly is not installed.
        DiskError: The file cannot be written.
    """
    runs = [run for folder in folders for run in folder.runs][:MOST_RUNS]
    traced = [
        (folder, stretches(ranks, folder.runs[0].events, chosen), rank_times(ranks))
        for folder, ranks in zip(folders, traces, strict=True)
        if ranks
    ]
    data = {
        "runs": [curves(run) for run in runs],
        "timelines": [timeline(folder.name, shown) for folder, shown, _ in traced],
        "memory": [memory(folder.name, times) for folder, _, times in traced],
    }
    body = "\n".join(_body(folders, runs, traced))
    replace_file(out, lambda path: path.write_text(_whole(folders, body, data), encoding="utf-8"))


def _whole(folders: Sequence[Contents], body: str, data: dict[str, Any]) -> str:
    """Return the whole file."""
    scripts = [_plotly(), _own("page.js")]
    policy = "; ".join(
        [
            "default-src 'none'",
            "script-src " + " ".join(f"'sha256-{_digest(script)}'" for script in scripts),
            "style-src 'unsafe-inline'",  # Plotly makes its own style element
            "img-src data: blob:",
        ]
    )
    names = _text(", ".join(folder.name for folder in folders))
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{names} - Stretto</title>",
            f"<style>\n{_own('page.css')}</style></head><body>",
            f"<header><h1>{names}</h1></header>",
            "<noscript><p class=note>The charts need JavaScript; the tables do not.</p></noscript>",
            body,
            # No text in it can end the element, whatever it says.
            f'<script type="application/json" id="data">{_json(data)}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        ]
    )


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _own(name: str) -> str:
    return resources.files("stretto.page").joinpath(name).read_text(encoding="utf-8")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingExtra("plotly", "cli", "the page of a report") from error
    return str(get_plotlyjs())


def _text(value: str) -> str:
    """Return text from a folder as text of the page."""
    shown = value if len(value) <= _TEXT else value[:_TEXT] + "…"
    return html.escape(printable(shown))


# The parts of the body


Traced = tuple[Contents, list[Stretch], list[RankTimes]]


def _body(folders: Sequence[Contents], runs: Sequence[Run], traced: Sequence[Traced]) -> Iterator[str]:
    yield from (_about(folder, "What ran" if len(folders) == 1 else folder.name) for folder in folders)
    if any(len(run.evaluations) or run.columns for run in runs):
        yield from _loss(runs)
    yield from _events(runs)
    yield from _time(runs)
    for index, (folder, shown, _) in enumerate(traced):
        yield _timeline(index, folder, shown)
    untraced = [
        folder.name for folder in folders if folder.is_traceable and folder.path not in _paths(traced)
    ]
    if untraced:
        names = _text(", ".join(untraced))
        yield _section(
            "What happened when",
            f"<p class=note>{names}: not traced. Train with <code>--trace</code>, and there is a timeline of both "
            "lanes of every rank, with the times and the memory of each.</p>",
        )
    yield from _input(runs)
    for index, (folder, _, times) in enumerate(traced):
        yield _ranks(index, folder, times)


def _paths(traced: Sequence[Traced]) -> list[Path]:
    return [folder.path for folder, _, _ in traced]


def _section(title: str, *parts: str) -> str:
    return "\n".join([f"<section><h2>{_text(title)}</h2>", *parts, "</section>"])


def _chart(name: str, label: str, *, small: bool = False) -> str:
    size = "chart small" if small else "chart"
    return f'<div class="{size}" id="{name}" role="group" aria-label="{html.escape(label)}"></div>'


def _table(table: Table) -> str:
    """Return a table; columns of numbers are aligned right."""
    rows = table.rows[:MOST_ROWS]
    width = len(table.headings)
    is_number = [bool(rows) and all(_is_number(row[column]) for row in rows) for column in range(width)]
    marks = [" class=number" if found else "" for found in is_number]
    head = "".join(f"<th{mark}>{_text(one)}</th>" for mark, one in zip(marks, table.headings, strict=True))
    body = "\n".join(
        "<tr>"
        + "".join(f"<td{mark}>{_text(cell)}</td>" for mark, cell in zip(marks, row, strict=True))
        + "</tr>"
        for row in rows
    )
    more = len(table.rows) - len(rows)
    return (
        f"<h3>{_text(table.title)}</h3>\n<div class=scroll tabindex=0><table><thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}\n</tbody></table></div>" + (f"<p class=note>and {more:,} more</p>" if more else "")
    )


def _is_number(cell: str) -> bool:
    return cell.strip(" %×").replace(",", "").replace(".", "").replace("-", "").isdigit() or cell == UNKNOWN


def _about(folder: Contents, title: str) -> str:
    facts = "\n".join(
        f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in folder.facts.items()
    )
    gaps = "\n".join(f"<li>{_text(gap)}</li>" for gap in folder.gaps)
    tables = [_table(table) for table in folder.tables if table.rows]
    missing = f"<ul class=gaps>\n{gaps}\n</ul>" if gaps else ""
    return _section(title, f"<dl>{facts}</dl>", missing, *tables)


def _loss(runs: Sequence[Run]) -> Iterator[str]:
    axes = {
        "updates": "committed updates",
        "samples": "samples",
        "seconds": "seconds of training",
        "bytes": "bytes sent",
    }
    options = "".join(f'<option value="{name}">{label}</option>' for name, label in axes.items())
    yield _section(
        "Loss",
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
        yield _section("Faults, verdicts and repairs", _table(table).removeprefix("<h3></h3>\n"))


def _time(runs: Sequence[Run]) -> Iterator[str]:
    known = [run for run in runs if run.time is not None]
    if not known:
        return
    rows = []
    for run in known:
        time = run.time
        if time is not None:
            parts = (time.seconds, time.compute, time.exposed, time.data, time.lane)
            model = UNKNOWN if time.model is None else f"{1000 * time.model:,.2f}"
            rows.append([run.name, *(f"{1000 * part:,.2f}" for part in parts), model, f"{time.updates:,}"])
    headings = ("run", "update", "compute", "exposed", "data", "lane busy", "time model", "updates")
    note = (
        "An average update of rank 0 in milliseconds, without evaluations and checkpoints; of a run also without its "
        "first updates, which are slower. Compute is all that is not waiting. The time model (docs/time-model.md) is "
        "given this compute time and this lane; what the rank waited for data is added. It has no row for strategies "
        "that average."
    )
    along = [
        f"<h3>{_text(run.name)}, along the run</h3>\n"
        + _chart(f"parts-{index}", "parts of an update along the run", small=True)
        for index, run in enumerate(runs)
        if run.columns and len(run.columns["step"])
    ]
    yield _section(
        "Where an update's time goes",
        f"<p class=note>{note}</p>",
        _chart("time", "compute, exposed communication and waiting for data", small=True),
        _table(Table(title="", headings=headings, rows=rows)).removeprefix("<h3></h3>\n"),
        *along,
    )


def _timeline(index: int, folder: Contents, shown: Sequence[Stretch]) -> str:
    name = f"timeline-{index}"
    options = "".join(f"<option>{_text(stretch.label)}</option>" for stretch in shown)
    buttons = "".join(
        f'<button type=button id="{name}-{move}" aria-label="{label}" title="{label}">{sign}</button>'
        for move, label, sign in (
            ("earlier", "earlier", "←"), ("later", "later", "→"), ("nearer", "zoom in", "+"),
            ("farther", "zoom out", "−"), ("whole", "show all", "all"),
        )
    )  # fmt: skip
    chart = _chart(name, "timeline of both lanes of every rank", small=True).replace(
        "<div ", "<div tabindex=0 ", 1
    )
    return _section(
        f"What happened when: {folder.name}",
        "<p class=note>Both lanes of every rank. Drag to zoom, double-click for all; on the keyboard the arrows, "
        f"+, - and 0 do the same. Up to {MOST_RANKS} ranks are drawn. Times are of the hosts' clocks.</p>",
        f'<div class=controls><label for="{name}-stretch">show</label><select id="{name}-stretch">{options}</select>'
        f"{buttons}</div>",
        f'<ul class=legend id="{name}-legend"></ul>',
        chart,
    )


def _input(runs: Sequence[Run]) -> Iterator[str]:
    parts = []
    for index, run in enumerate(runs):
        if not (run.columns and len(run.columns["step"])):
            continue
        fresh, echoed, waited = (np.nansum(run.columns[name]) for name in ("fresh", "echoed", "wait_seconds"))
        parts.append(
            f"<p>{_text(run.name)}: rank 0 took {fresh:,.0f} fresh batches, used {echoed:,.0f} again, and waited "
            f"{waited:,.2f} s for data.</p>"
        )
        if echoed > 0:
            parts.append(_chart(f"input-{index}", "fresh and echoed batches", small=True))
    if parts:
        yield _section("Fresh and echoed batches", *parts)


def _ranks(index: int, folder: Contents, times: Sequence[RankTimes]) -> str:
    """Return the section about single ranks: who is slow, who is waited for, and how much memory each had."""
    fastest = min((one.micro_batch for one in times if one.micro_batch > 0), default=np.nan)
    counts = folder.runs[0].micro_batches
    headings = ("rank", "ms per micro-batch", "of the fastest", "micro-batches", "last to reduce", "most MB")
    rows = [
        [
            str(one.rank),
            _shown(1000 * one.micro_batch, "{:,.2f}"),
            _shown(one.micro_batch / fastest, "{:.2f} ×"),
            _shown(counts[one.rank] if one.rank < len(counts) else np.nan, "{:.2f}"),
            _shown(100 * one.last, "{:.0f} %"),
            _shown(one.memory[-1][1] / 1e6 if one.memory else np.nan, "{:,.0f}"),
        ]
        for one in times
    ]
    kinds = sorted(
        {kind for one in times for kind in one.per_update},
        key=ORDER.index,
    )
    per_kind = [
        [kind, *(_shown(1000 * one.per_update.get(kind, 0.0), "{:,.2f}") for one in times)] for kind in kinds
    ]
    by_kind = Table(
        title="Milliseconds per update",
        headings=("lane and kind", *(f"rank {one.rank}" for one in times)),
        rows=per_kind,
    )
    return _section(
        f"Ranks and stragglers: {folder.name}",
        f"<p class=note>{_straggler(times, fastest)} Means over updates at even distances. Memory is the most that the "
        "process had resident until then, or what was allocated on its GPU.</p>",
        _table(Table(title="By rank", headings=headings, rows=rows)),
        _table(by_kind),
        "<h3>Memory</h3>",
        _chart(f"memory-{index}", "memory of every rank along the run", small=True),
    )


def _straggler(times: Sequence[RankTimes], fastest: float) -> str:
    known = [one for one in times if one.micro_batch > 0]
    if len(known) < 2:
        return ""
    slowest = max(known, key=lambda one: one.micro_batch)
    ratio = slowest.micro_batch / fastest
    return f"Rank {slowest.rank} is the slowest: its micro-batches take {ratio:.2f} times as long as the fastest."


def _shown(value: float, text: str) -> str:
    return text.format(value) if np.isfinite(value) else UNKNOWN
