"""Tables of a comparison's results, on the screen or in a file."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from stretto_lab.patience import COLUMNS


def _print_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells under headings of several lines, in 80 columns; long names are folded."""
    heads = [heading.split("\n") for heading in headings]
    depth = max(map(len, heads))
    top = zip(*([""] * (depth - len(head)) + head for head in heads), strict=True)
    widths = [
        max(map(len, [*head, *cells])) for head, cells in zip(heads, zip(*rows, strict=True), strict=True)
    ]
    widths[0] = min(widths[0], COLUMNS - sum(width + 1 for width in widths[1:]))
    print()
    for line in [*top, ["-" * width for width in widths], *rows]:
        name, numbers = line[0], [f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)][1:]
        print(" ".join([f"{name[: widths[0]]:{widths[0]}}", *numbers]).rstrip())
        for begin in range(widths[0], len(name), widths[0]):
            print(name[begin : begin + widths[0]])
    print()


LIMIT = "compute"
"""The arm that never communicates; its rate limits the throughput."""

Run = dict[str, Any]


def print_comparison(runs: Sequence[Run]) -> None:
    """Print the medians of each arm, in the order of their first runs, and below them the range of several repeats.

    It skips a column in which no arm has a number. The table fits 80 columns.

    Args:
        runs: Records of a comparison.
    """
    rows: list[tuple[str, ...]] = []
    for arm in dict.fromkeys(run["strategy"] for run in runs):
        columns = _comparison_columns([run for run in runs if run["strategy"] == arm], runs)
        headings = ("arm", *columns)
        lines = zip(*columns.values(), strict=True)
        rows += [
            (name, *line)
            for name, line in zip((arm, "  least", "  greatest"), lines, strict=True)
            if any(line)
        ]
    used = [index for index in range(len(headings)) if any(row[index] not in ("", "-") for row in rows)]
    _print_table([headings[index] for index in used], [[row[index] for index in used] for row in rows])
    print(f"Medians{_in_units(runs)}. With 1/2 after it, a number is of one run out of two.")
    print("exposed: share of the time that waited for communication")


def _in_units(runs: Sequence[Run]) -> str:
    units = sorted({run["loss_unit"] for run in runs if run.get("loss_unit")})
    return f", losses in {', '.join(units)}" if units else ""


def shares_of_limit(own: Sequence[Run], runs: Sequence[Run]) -> list[float]:
    """Return the rate of each run as a share of `LIMIT`'s rate in the same repeat, where both are known."""
    limits = {run["repeat"]: run["samples_per_second"] for run in runs if run["strategy"] == LIMIT}
    return [
        run["samples_per_second"] / limits[run["repeat"]]
        for run in own
        if run["samples_per_second"] and limits.get(run["repeat"])
    ]


def _comparison_columns(own: Sequence[Run], runs: Sequence[Run]) -> dict[str, tuple[str, str, str]]:
    """Return median, minimum and maximum of one arm's runs, by heading."""
    waited = [run["exposed_seconds"] / run["seconds"] for run in own if run["exposed_seconds"] is not None]
    return {
        "samples\nper s": _spread(_known(own, "samples_per_second"), "{:,.0f}".format),
        f"of\n{LIMIT}": _spread(shares_of_limit(own, runs), "{:.0%}".format),
        "updates": _spread(_known(own, "updates"), "{:g}".format),
        "held-out\nloss": _spread(_known(own, "heldout_loss"), "{:.4f}".format, of=len(own)),
        "s to\ntarget": _spread(_known(own, "seconds_to_loss"), "{:.1f}".format, of=len(own)),
        "exposed": _spread(waited, "{:.0%}".format),
        "MB\nsent": _spread([run["sent_bytes"] / 1e6 for run in own], "{:,.1f}".format),
    }


def _known(runs: Sequence[Run], field: str) -> list[float]:
    """Return the finite values of a field."""
    return [run[field] for run in runs if run[field] is not None and math.isfinite(run[field])]


def _spread(
    values: Sequence[float], text: Callable[[float], str], of: int | None = None
) -> tuple[str, str, str]:
    """Return the median, and the minimum and maximum if they differ.

    If there are fewer values than `of`, the median is followed by their number.
    """
    if not values:
        return "-", "", ""
    median = text(statistics.median(values))
    if of is not None and of != len(values):
        median += f" {len(values)}/{of}"
    return (median, "", "") if min(values) == max(values) else (median, text(min(values)), text(max(values)))
