"""The page: one HTML file with SVG pictures, which opens offline and contains no scripts.

`text` escapes everything that folders contain. A content security policy forbids scripts and requests.
"""

import html
import math
from collections.abc import Iterator, Sequence
from importlib import resources

import numpy as np

from stretto.terminal import printable
from stretto_lab.page.folder import Column, Contents, Run, UpdateTime, formatted

MOST_RUNS = 40
"""Whose losses are drawn."""
MOST_ROWS = 300
"""Most rows of a table."""
MOST_LETTERS = 2000
"""Characters of one text from a folder."""
MOST_POINTS = 1000
"""Of a run, evenly chosen of all: more than a picture has pixels."""
_LEFT, _WIDTH, _HEIGHT = 60, 720, 260
"""Of the picture of losses: its margin, and the field of its points."""


def text(value: str) -> str:
    """Return text from a folder, escaped for the page."""
    shown = value if len(value) <= MOST_LETTERS else value[:MOST_LETTERS] + "…"
    return html.escape(printable(shown))


def page(folders: Sequence[Contents]) -> str:
    """Return the page about some folders, in their order."""
    names = text(", ".join(folder.name for folder in folders))
    style = resources.files("stretto_lab.page").joinpath("page.css").read_text(encoding="utf-8")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{names} - Stretto</title><style>\n{style}</style></head><body><h1>{names}</h1>",
            *_sections(folders),
            "</body></html>\n",
        ]
    )


def _sections(folders: Sequence[Contents]) -> Iterator[str]:
    for folder in folders:
        yield f"<section><h2>{'What ran' if len(folders) == 1 else text(folder.name)}</h2><dl>"
        yield from (f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in folder.facts.items())
        yield "</dl>"
        if folder.gaps:
            yield f"<ul class=gaps>{''.join(f'<li>{text(gap)}</li>' for gap in folder.gaps)}</ul>"
        yield "</section>"
    every = [run for folder in folders for run in folder.runs]
    runs = every[:MOST_RUNS]
    yield from _times([(run.name, run.time) for run in runs if run.time is not None])
    if picture := [*_losses(runs)]:
        yield "<section><h2>Held-out loss</h2>"
        if len(every) > len(runs):
            yield f"<p class=note>{len(every) - len(runs):,} more runs are not drawn.</p>"
        if len(runs) > 1:
            yield "<ul class=legend>"
            yield from (f"<li class=c{index % 8}>{text(run.name)}</li>" for index, run in enumerate(runs))
            yield "</ul>"
        yield from picture
        yield "</section>"
    if rows := [(folder.name, *event) for folder in folders for event in folder.events]:
        yield "<section><h2>Faults, verdicts and repairs</h2>"
        yield from _table(("run", "update", "what", "where, by whom, and the repair"), rows)
        yield "</section>"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    if not rows:
        return
    yield f"<div class=scroll tabindex=0><table><tr>{''.join(f'<th>{one}</th>' for one in headings)}</tr>"
    for row in rows[:MOST_ROWS]:
        yield f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>"
    yield "</table></div>"
    if len(rows) > MOST_ROWS:
        yield f"<p class=note>and {len(rows) - MOST_ROWS:,} more</p>"


def _times(runs: Sequence[tuple[str, UpdateTime]]) -> Iterator[str]:
    """Yield the two lanes of each run's average update, and their milliseconds."""
    longest = max((time.seconds for _, time in runs), default=0.0)
    if not longest > 0:
        return
    yield (
        "<section><h2>Where an update's time goes</h2><p class=note>An average update of rank 0, without "
        "evaluations and checkpoints; of a run also without its first updates, which are slower. The upper "
        "bar is the rank, the lower bar its network. Stock methods do not report these parts.</p><ul "
        "class=legend><li class=compute>computing</li><li class=exposed>waiting for other ranks</li><li "
        "class=data>waiting for data</li><li class=lane>network busy</li></ul>"
    )
    rows = []
    for name, time in runs:
        parts = {"compute": time.compute, "exposed": time.exposed, "data": time.data}
        if not math.isfinite(time.compute):
            parts = {"undivided": time.seconds - time.data, "data": time.data}
        places, begin = [], 0.0
        for kind, seconds in parts.items():
            places.append((kind, begin, seconds, 0))
            begin += seconds
        if math.isfinite(time.lane):
            places.append(("lane", 0.0, min(time.lane, longest), 16))
        bars = "".join(
            f'<rect class="{kind}" x="{800 * begin / longest:.1f}" y="{y}" width="{800 * seconds / longest:.1f}" '
            f'height="13"><title>{kind} {1000 * seconds:,.2f} ms</title></rect>'
            for kind, begin, seconds, y in places
        )
        yield f'<h3>{text(name)}</h3><svg class="lanes" viewBox="0 0 800 30" role="img">{bars}</svg>'
        measured = (time.seconds, time.compute, time.exposed, time.data, time.lane)
        rows.append([name, *(formatted(1000 * part, "{:,.2f}") for part in measured), f"{time.updates:,}"])
    headings = (
        "run",
        "update, ms",
        "computing",
        "waiting for ranks",
        "waiting for data",
        "network busy",
        "updates",
    )
    yield from _table(headings, rows)
    yield "</section>"


def _losses(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the picture of all held-out losses against the seconds of training, if any can be drawn."""
    drawn = [run.evaluations[np.isfinite(run.evaluations).all(axis=1)] for run in runs]
    drawn = [points[:: len(points) // MOST_POINTS + 1] for points in drawn]
    whole = np.concatenate([np.empty((0, 3)), *drawn])[:, 1:]
    if not len(whole):
        return
    low, high = whole.min(axis=0), whole.max(axis=0)
    span = np.where(high > low, high - low, 1.0)

    def placed(points: Column) -> Column:
        share = (points - low) / span
        return np.stack([_LEFT + share[:, 0] * _WIDTH, 10 + (1 - share[:, 1]) * _HEIGHT], axis=1)

    yield '<svg class="chart" viewBox="0 0 800 310" role="img" aria-label="held-out loss against seconds of training">'
    for tick in _ticks(low[1], low[1] + span[1]):
        y = placed(np.array([[low[0], tick]]))[0, 1]
        yield f'<path class="grid" d="M{_LEFT} {y:.1f}h{_WIDTH}"/><text x="50" y="{y + 4:.1f}">{tick:.6g}</text>'
    for tick in _ticks(low[0], low[0] + span[0]):
        x = placed(np.array([[tick, low[1]]]))[0, 0]
        yield f'<text class="below" x="{x:.1f}" y="288">{tick:.6g}</text>'
    yield f'<text class="below" x="{_LEFT + _WIDTH / 2}" y="306">seconds of training</text>'
    for index, (run, points) in enumerate(zip(runs, drawn, strict=True)):
        yield f'<g class="c{index % 8}">'
        for (x, y), (step, seconds, loss) in zip(placed(points[:, 1:]), points, strict=True):
            title = f"{text(run.name)}, {step:.6g} updates, {seconds:.6g} s: {loss:.6g}"
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{title}</title></circle>'
        yield "</g>"
    yield "</svg>"


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers between two."""
    raw = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= raw)
    return [step * index for index in range(math.ceil(low / step), math.floor(high / step) + 1)]
