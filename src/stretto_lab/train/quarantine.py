"""Records of excluded workers: a line of `quarantine.jsonl` in the run's folder for each exclusion."""

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
    """Add a line to the file.

    Args:
        folder: The run's folder.
        cause: The cause in words.
        damages: The errors that workers have raised, at least one.
        world_size: Number of workers before.
        left_out: The excluded ranks.
        goes_on_with: Number of ranks that continue; None if none does.
        begins_at: The name of the checkpoint from which they continue, or `memory`; None is the beginning.
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
