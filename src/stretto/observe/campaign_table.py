"""The table of a campaign: what was promised about each kind of damage, and what became of it."""

from collections.abc import Mapping
from typing import Any

from stretto.observe.table import print_table

_HEADINGS = (
    "site",
    "extent",
    "strategies",
    "guard",
    "promised",
    "applied",
    "harmful",
    "detected",
    "named",
    "identical",
    "error",
    "updates",
    "overhead",
)


def print_campaign(report: Mapping[str, Any]) -> None:
    """Print one row per kind of damage, and what all rows come to.

    Args:
        report: Of a campaign.

    Raises:
        MissingExtra: rich is not installed.
    """
    print_table(
        "campaign",
        "applied of drawn; harmful without guards; detected, named and identical of applied; the most updates "
        "to detection; overhead of a guarded job's processor time, at this small size",
        _HEADINGS,
        map(_cells, report["sites"]),
        left=5,
        width=200,
    )
    print(
        f"{report['applied']} of {report['faults']} faults changed bits ({report['on_real_workers']} drawn for real "
        f"workers); {len(report['broken'])} promises broken; {report['false_alarms']} false alarms in "
        f"{report['clean_rounds']:,} clean rounds; {report['seconds']:.0f} s"
    )


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["site"],
        row["extent"] + (", again and again" if row["lasts"] else ""),
        row["strategies"],
        row["guard"] or "-",
        row["promised"],
        f"{row['applied']} of {row['drawn']}",
        *(str(row[key]) for key in ("harmful", "detected", "named", "identical", "ended_with_error")),
        "-" if row["updates_to_detect"] is None else str(row["updates_to_detect"]),
        f"{row['overhead'] - 1:+.0%}",
    )
