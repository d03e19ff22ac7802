"""Tables on the screen or in a file: the results of a comparison, and those of a campaign."""

import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from stretto.errors import MissingExtra


def print_table(
    what: str, caption: str, headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: int, width: int
) -> None:
    """Print rows of cells under headings.

    Args:
        what: What the table is of; for the error.
        caption: Text below the table.
        headings: One per column.
        rows: Each with one cell per column.
        left: Number of columns, from the first, that are aligned left; the others are aligned right.
        width: Characters of a line in a file; a terminal has a width of its own.

    Raises:
        MissingExtra: rich is not installed.
    """
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError as error:
        raise MissingExtra("rich", "cli", f"the table of a {what}") from error
    table = Table(caption=caption, caption_justify="left")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < left else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=None if Console().is_terminal else width).print(table)


LIMIT = "compute"
"""The arm that never communicates; its rate is the limit of throughput."""

_COMPARISON_HEADINGS = (
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
    """Print one row per arm, in the order of their first runs: medians with their range.

    Args:
        runs: Records of a comparison.

    Raises:
        MissingExtra: rich is not installed.
    """
    arms = dict.fromkeys(run["strategy"] for run in runs)
    print_table(
        "comparison",
        "median, and least to greatest where there are several repeats",
        _COMPARISON_HEADINGS,
        ([arm, *_comparison_cells([run for run in runs if run["strategy"] == arm], runs)] for arm in arms),
        left=1,
        width=140,
    )


def shares_of_limit(own: Sequence[Run], runs: Sequence[Run]) -> list[float]:
    """Return the rate of each run as a share of the rate of `LIMIT` in the same repeat, where both have one."""
    limits = {run["repeat"]: run["samples_per_second"] for run in runs if run["strategy"] == LIMIT}
    return [
        run["samples_per_second"] / limits[run["repeat"]]
        for run in own
        if run["samples_per_second"] and limits.get(run["repeat"])
    ]


def _comparison_cells(own: Sequence[Run], runs: Sequence[Run]) -> list[str]:
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
    """Return the median and the range of `values`, and where they are fewer than `of`, how many of those."""
    if not values:
        return "-"
    shown = text(statistics.median(values))
    if min(values) != max(values):
        shown += f" ({text(min(values))} to {text(max(values))})"
    return shown if of is None or of == len(values) else f"{shown}, {len(values)} of {of}"


_CAMPAIGN_HEADINGS = ("damage", "applied", "harmful", "detected", "named", "identical", "error")


def print_campaign(report: Mapping[str, Any]) -> None:
    """Print one row for each kind of damage, grouped by the guard that watches for it, and the totals.

    The table fits 80 columns; a wider screen gives longer lines in the first column.

    Args:
        report: What campaign.json holds.

    Raises:
        MissingExtra: rich is not installed.
    """
    by_guard: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(report["sites"], key=lambda row: row["guard"] is None):
        by_guard.setdefault(row["guard"] or "nobody", []).append(row)
    cells: list[tuple[str, ...]] = []
    for guard, rows in by_guard.items():
        cells += [(f"Seen by {guard}:", *[""] * (len(_CAMPAIGN_HEADINGS) - 1)), *map(_campaign_cells, rows)]
    print_table(
        "campaign",
        "Faults by what they damaged. applied: they changed bits in the guarded job; harmful: they changed the "
        "outcome of the job without guards. All other columns count applied faults.",
        _CAMPAIGN_HEADINGS,
        cells,
        left=1,
        width=80,
    )
    print(f"{report['applied']} of {report['faults']} faults changed bits")
    print(f"{report['on_real_workers']} of {report['faults']} faults struck real workers")
    delays = [row["updates_to_detect"] for row in report["sites"] if row["updates_to_detect"] is not None]
    if delays:
        print(f"damage was detected after at most {max(delays)} updates")
    print(f"{len(report['broken'])} promises broken")
    print(f"{report['false_alarms']} false alarms in {report['clean_rounds']:,} clean rounds")
    overheads = ", ".join(f"{name} {share - 1:+.0%}" for name, share in report["overheads"].items())
    print(textwrap.fill(f"processor time of guards: {overheads}", 80))
    print(f"{report['seconds']:.0f} s")


def _campaign_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    kind = [row["site"]]
    kind += [row[key] for key, usual in (("extent", "any"), ("strategies", "all")) if row[key] != usual]
    kind += ["repeated"] if row["lasts"] else []
    kind += [f"{row['audit_rate']:.0%} of rounds"] if row["audit_rate"] is not None else []
    columns = ("applied", "harmful", "detected", "named", "identical", "ended_with_error")
    return ", ".join(kind), *(str(row[key]) for key in columns)
