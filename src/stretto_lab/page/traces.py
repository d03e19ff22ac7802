"""Reading traces: which updates are shown in full, and what the ranks' times say (`stretto_lab.observe.trace`).

A trace of a long run has more spans than a page can hold. An index finds any update in a file without reading the
others. Stretches of updates are then shown whole, and means are taken over updates at even distances.
"""

import dataclasses
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stretto_lab.observe.trace import FOLDER
from stretto_lab.page.contents import Event
from stretto_lab.page.records import items, mapping, number

LANES = ("compute", "communication")
KINDS = (
    "micro-batch", "data", "exposed", "reduce", "step", "gather", "preview", "leaving", "average", "launch", "land",
    "guard", "evaluation", "checkpoint", "other",
)  # fmt: skip
"""Kinds of spans, in the order in which they are listed; a kind that is not among them is shown as the last one."""
ORDER = tuple(f"{lane}: {kind}" for lane in LANES for kind in KINDS)
BUDGET_BYTES = 3_000_000
"""Of the files that are shown in full; in the page they take about as much."""
SAMPLED_UPDATES = 1000
"""Of each rank, for the means."""
MOST_RANKS = 32
"""That are shown."""
MOST_MARKS = 200
"""Events that a stretch marks."""
_STRETCH = 20
_STEP = re.compile(rb'\{"step": ?(\d{1,15}),')
_KIND_INDEX = {kind: index for index, kind in enumerate(KINDS)}


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """One piece of work of one lane; times in microseconds on the clock of all ranks."""

    lane: str
    kind: str
    start: float
    length: float


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """What ended in one update of one rank."""

    step: int
    spans: list[Span]
    peak_bytes: float


class RankTrace:
    """The file of one rank, and where each update lies in it."""

    def __init__(self, path: Path, rank: int, gaps: list[str]) -> None:
        self.rank = rank
        self.size = path.stat().st_size
        self._path = path
        self._lines: dict[int, list[tuple[int, int]]] = defaultdict(list)
        offset = damaged = 0
        with path.open("rb") as file:
            for line in file:
                found = _STEP.match(line) if line.endswith(b"\n") else None
                if found is None:
                    damaged += 1
                else:
                    self._lines[int(found[1])].append((offset, len(line)))
                offset += len(line)
        self.steps = sorted(self._lines)
        if damaged:
            gaps.append(f"{FOLDER}/{path.name}: {damaged} lines are damaged or incomplete, and left out")

    def read(self, steps: Iterable[int]) -> Iterator[Line]:
        """Yield the lines of these updates; what is damaged in them is left out."""
        with self._path.open("rb") as file:
            for step in steps:
                for offset, length in self._lines.get(step, ()):
                    file.seek(offset)
                    yield _line(step, file.read(length))


def _line(step: int, text: bytes) -> Line:
    try:
        record = mapping(json.loads(text))
    except (ValueError, RecursionError):
        record = {}
    at, spans = number(record.get("at")), []
    for lane in LANES:
        for span in items(record.get(lane)):
            kind, start, length = span if isinstance(span, list) and len(span) == 3 else ("", None, None)
            begin, duration = at + number(start), number(length)
            if 0 <= duration < 1e15 and abs(begin) < 2**53:
                spans.append(Span(lane, kind if kind in _KIND_INDEX else KINDS[-1], begin, duration))
    return Line(step, spans, number(record.get("peak_bytes")))


def open_traces(folder: Path, gaps: list[str]) -> list[RankTrace]:
    """Return the traces in the folder of a run, in rank order; none where it was not traced."""
    found = []
    for path in (folder / FOLDER).glob("rank-*.jsonl"):
        name = re.fullmatch(r"rank-(\d{1,6})\.jsonl", path.name)
        if name is None or not path.is_file():
            gaps.append(f"{FOLDER}/{path.name} is no trace")
            continue
        try:
            trace = RankTrace(path, int(name[1]), gaps)
        except OSError as error:
            gaps.append(f"{FOLDER}/{path.name} cannot be read: {error.strerror}")
            continue
        if trace.steps:
            found.append(trace)
    return sorted(found, key=lambda trace: trace.rank)


# What is shown in full


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Updates that follow each other, and all their spans."""

    label: str
    rows: list[dict[str, Any]]
    """One per rank and lane: its rank, lane, and of every span start (microseconds), length, kind and step."""
    marks: list[tuple[int, str]]
    """Events: when the update of each was over on the first rank, and what it was."""


def stretches(
    traces: Sequence[RankTrace], events: Sequence[Event], chosen: tuple[int, int] | None
) -> list[Stretch]:
    """Return the stretches that a page shows.

    Args:
        traces: Of all ranks; `MOST_RANKS` of them are shown.
        events: Of the run; the first ones are shown.
        chosen: First and last update that the user asks for, beside those that are shown anyway.
    """
    shown = traces[:MOST_RANKS]
    steps = sorted({step for trace in shown for step in trace.steps})
    if sum(trace.size for trace in shown) <= BUDGET_BYTES:
        ranges = {"the whole run": (steps[0], steps[-1])}
    else:
        ranges = _ranges(steps, events)
    if chosen is not None:
        # One more on either side: a lane ahead of the other one works for the next update already.
        ranges = {f"updates {chosen[0]} to {chosen[1]}": (chosen[0] - 1, chosen[1] + 1), **ranges}
    found: list[Stretch] = []
    room = int(BUDGET_BYTES * len(steps) / sum(trace.size for trace in shown))
    for label, (first, last) in ranges.items():
        wanted = [step for step in steps if first <= step <= last]
        within = wanted[: room if found else max(1, room)]
        if within:
            told = label if len(within) == len(wanted) else f"{label}, the first {len(within)} of them"
            found.append(_stretch(told, shown, within, events))
            room = max(0, room - len(within))
    return found


def _ranges(steps: Sequence[int], events: Sequence[Event]) -> dict[str, tuple[int, int]]:
    """Return first and last update of stretches of a long run, by label, the most telling ones first."""
    middle = steps[len(steps) // 2]
    ranges = {
        f"from the middle: update {middle}": (middle, middle + _STRETCH),
        f"the beginning: update {steps[0]}": (steps[0], steps[0] + _STRETCH),
        f"the end: update {steps[-1]}": (steps[-1] - _STRETCH, steps[-1]),
    }
    for event in events[:10]:
        if np.isfinite(event.step):
            ranges[f"{event.kind}: update {event.step:.0f}"] = (int(event.step) - 3, int(event.step) + 3)
    for place in range(1, 10):
        step = steps[len(steps) * place // 10]
        ranges[f"{place}0 % of the run: update {step}"] = (step, step + _STRETCH // 4)
    return ranges


def _stretch(
    label: str, traces: Sequence[RankTrace], steps: Sequence[int], events: Sequence[Event]
) -> Stretch:
    lines = {trace.rank: list(trace.read(steps)) for trace in traces}
    starts = [span.start for found in lines.values() for line in found for span in line.spans]
    origin = min(starts, default=0.0)
    rows = []
    for rank, found in lines.items():
        for lane in LANES:
            spans = sorted(
                ((span, line.step) for line in found for span in line.spans if span.lane == lane),
                key=lambda pair: pair[0].start,
            )
            rows.append(
                {
                    "rank": rank,
                    "lane": lane,
                    "start": [int(span.start - origin) for span, _ in spans],
                    "length": [int(span.length) for span, _ in spans],
                    "kind": [_KIND_INDEX[span.kind] for span, _ in spans],
                    "step": [step for _, step in spans],
                }
            )
    ends = {
        line.step: max(span.start + span.length for span in line.spans)
        for line in reversed(lines[traces[0].rank])
        if line.spans
    }
    marks = [
        (int(ends[int(event.step)] - origin), f"update {event.step:.0f}: {event.text}"[:300])
        for event in events[:MOST_MARKS]
        if event.step in ends
    ]
    return Stretch(label=label, rows=rows, marks=marks)


# What the times of the ranks say


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankTimes:
    """Means of one rank over the sampled updates."""

    rank: int
    micro_batch: float
    """Seconds of one micro-batch; NaN where there is none."""
    per_update: dict[str, float]
    """Seconds of an update by lane and kind."""
    last: float
    """Share of the updates at which this rank came last to the first reduction; NaN where there is none."""
    memory: list[tuple[int, float]]
    """Update, and most bytes in use until then."""


def rank_times(traces: Sequence[RankTrace]) -> list[RankTimes]:
    """Return the means of every rank, over `SAMPLED_UPDATES` of its updates at most."""
    arrivals: dict[int, dict[int, float]] = defaultdict(dict)
    sums: dict[int, dict[str, float]] = {}
    counts: Counter[int] = Counter()
    updates: dict[int, int] = {}
    memory: dict[int, list[tuple[int, float]]] = {}
    for trace in traces:
        distance = -(-len(trace.steps) // SAMPLED_UPDATES)
        steps = trace.steps[::distance]
        updates[trace.rank], sums[trace.rank], memory[trace.rank] = len(steps), defaultdict(float), []
        for line in trace.read(steps):
            memory[trace.rank].append((line.step, line.peak_bytes))
            for span in line.spans:
                sums[trace.rank][f"{span.lane}: {span.kind}"] += span.length / 1e6
                counts[trace.rank] += span.kind == "micro-batch"
                if span.kind == "reduce":
                    arrivals[line.step].setdefault(trace.rank, span.start)
    last = Counter(
        max(found, key=found.__getitem__) for found in arrivals.values() if len(found) == len(traces)
    )
    return [
        RankTimes(
            rank=trace.rank,
            micro_batch=sums[trace.rank]["compute: micro-batch"] / (counts[trace.rank] or np.nan),
            per_update={kind: total / updates[trace.rank] for kind, total in sums[trace.rank].items()},
            last=last[trace.rank] / last.total() if last and len(traces) > 1 else np.nan,
            memory=memory[trace.rank],
        )
        for trace in traces
    ]
