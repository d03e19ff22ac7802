"""The table of a comparison: medians with their spread, speed also as a share of what computing alone reaches."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from stretto.observe.table import print_table

LIMIT = "compute"
"""The arm that never communicates: the limit of throughput."""

_HEADINGS = (
    "strategy",
    "samples/s",
    f"of {LIMIT}",
    "updates",
    "held-out loss",
    "to target",
    "exposed",
    "sent",
)

Run = dict[str, Any]


def print_comparison(runs: Sequence[Run]) -> None:
    """Print one row per arm, in the order of their first runs.

    Args:
        runs: Records of a comparison.

    Raises:
        MissingExtra: rich is not installed.
    """
    arms = dict.fromkeys(run["strategy"] for run in runs)
    print_table(
        "comparison",
        "median, and least to greatest where there are several repeats",
        _HEADINGS,
        ([arm, *_cells([run for run in runs if run["strategy"] == arm], runs)] for arm in arms),
        left=1,
        width=140,
    )


def shares_of_limit(own: Sequence[Run], runs: Sequence[Run]) -> list[float]:
    """Return the rate of each run as a share of the limit's in the same repeat, where both have one."""
    limits = {run["repeat"]: run["samples_per_second"] for run in runs if run["strategy"] == LIMIT}
    return [
        run["samples_per_second"] / limits[run["repeat"]]
        for run in own
        if run["samples_per_second"] and limits.get(run["repeat"])
    ]


def _cells(own: Sequence[Run], runs: Sequence[Run]) -> list[str]:
    return [
        _spread(_known(own, "samples_per_second"), "{:,.0f}".format),
        _spread(shares_of_limit(own, runs), "{:.0%}".format),
        _spread(_known(own, "updates"), "{:g}".format),
        _spread(_known(own, "heldout_loss"), "{:.4f}".format),
        _spread(_known(own, "seconds_to_loss"), "{:.1f} s".format, of=len(own)),
        _spread(
            [run["exposed_seconds"] / run["seconds"] for run in own if run["exposed_seconds"] is not None],
            "{:.0%}".format,
        ),
        _spread([run["sent_bytes"] / 1e6 for run in own], "{:,.1f} MB".format),
    ]


def _known(runs: Sequence[Run], field: str) -> list[float]:
    return [run[field] for run in runs if run[field] is not None]


def _spread(values: Sequence[float], text: Callable[[float], str], of: int | None = None) -> str:
    """Return the median and the range; with `of`, also how many of that many runs have a value."""
    if not values:
        return "-"
    shown = text(statistics.median(values))
    if min(values) != max(values):
        shown += f" ({text(min(values))} to {text(max(values))})"
    return shown if of is None or of == len(values) else f"{shown}, {len(values)} of {of}"
