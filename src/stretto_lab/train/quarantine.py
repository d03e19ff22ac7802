"""Records in a run's folder of workers that were excluded because of damage: a line of `quarantine.jsonl` each time."""

import platform
from collections.abc import Collection, Sequence
from pathlib import Path

from stretto.errors import CorruptionError
from stretto.records import Incident
from stretto_lab.observe import append_json_line

FILE = "quarantine.jsonl"


def note_damage(
    folder: Path,
    cause: str,
    damages: Sequence[CorruptionError],
    *,
    world_size: int,
    left_out: Collection[int],
    goes_on_with: int | None,
    begins_at: str | None,
) -> None:
    """Add a line to the folder of a run.

    Args:
        folder: Of the run.
        cause: In words.
        damages: What workers have raised, one at least.
        world_size: How many workers there were.
        left_out: Ranks without which the others continue.
        goes_on_with: The number of ranks that continue; None if none does.
        begins_at: The name of the checkpoint from which they do, or `memory`; None is the beginning.
    """
    found = dict.fromkeys(incident for damage in damages for incident in damage.incidents)
    append_json_line(
        folder / FILE,
        {
            "error": type(damages[0]).__name__,
            "cause": cause,
            "host": platform.node(),
            "world_size": world_size,
            "named": sorted({rank for damage in damages for rank in damage.ranks}),
            "links": sorted({link for damage in damages for link in damage.links}),
            "left_out": list(left_out),
            "goes_on_with": goes_on_with,
            "checkpoint": begins_at,
            "incidents": [incident.as_json() for incident in found if isinstance(incident, Incident)],
        },
    )
