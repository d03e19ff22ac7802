"""A trace in the format of chrome://tracing, which ui.perfetto.dev reads too: a process per rank, a thread per lane."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from stretto.disk import replace_file
from stretto_lab.page.traces import LANES, RankTrace


def write_perfetto(traces: Sequence[RankTrace], path: Path) -> int:
    """Write all spans of all ranks, and return how many there are.

    Raises:
        DiskError: The file cannot be written.
    """
    written = 0

    def write(unfinished: Path) -> None:
        nonlocal written
        with unfinished.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit": "ms", "traceEvents": [')
            for index, event in enumerate(_events(traces)):
                file.write(("" if index == 0 else ",") + "\n" + json.dumps(event))
                written += event["ph"] == "X"
            file.write("\n]}\n")

    replace_file(path, write)
    return written


def _events(traces: Sequence[RankTrace]) -> Iterator[dict[str, object]]:
    for trace in traces:
        yield {"ph": "M", "name": "process_name", "pid": trace.rank, "args": {"name": f"rank {trace.rank}"}}
        for thread, lane in enumerate(LANES):
            yield {"ph": "M", "name": "thread_name", "pid": trace.rank, "tid": thread, "args": {"name": lane}}
        for line in trace.read(trace.steps):
            for span in line.spans:
                yield {
                    "ph": "X",
                    "name": span.kind,
                    "ts": span.start,
                    "dur": span.length,
                    "pid": trace.rank,
                    "tid": LANES.index(span.lane),
                    "args": {"update": line.step},
                }
