"""Readers of a run's files, which may be damaged, incomplete or hostile.

Nothing here raises because of a file's content. Unreadable parts are skipped and named in a list of gaps.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stretto.disk import read_whole

LARGEST = 1e100
"""Largest magnitude of a plausible measurement; sums and squares of such numbers are finite."""


def number(value: object) -> float:
    """Return a number up to `LARGEST` unchanged, and NaN for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        found = float(value)
    except OverflowError:
        return math.nan
    return found if abs(found) <= LARGEST else math.nan


def items(value: object) -> list[Any]:
    """Return a list unchanged, and an empty one for anything else."""
    return value if isinstance(value, list) else []


def mapping(value: object) -> dict[str, Any]:
    """Return a JSON object unchanged, and an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def read_json(path: Path, gaps: list[str]) -> dict[str, Any]:
    """Return the object in a JSON file; if there is none, an empty object, and add a gap."""
    try:
        content = json.loads(read_whole(path))
    except FileNotFoundError:
        gaps.append(f"{path.name} is missing")
    except OSError as error:
        gaps.append(f"{path.name} cannot be read: {error.strerror}")
    except (ValueError, RecursionError):
        gaps.append(f"{path.name} is damaged: it is no JSON")
    else:
        if isinstance(content, dict):
            return content
        gaps.append(f"{path.name} is damaged: it holds no object")
    return {}


def read_records(folder: Path, name: str, gaps: list[str], *, expected: bool) -> Iterator[dict[str, Any]]:
    """Yield the objects in a file of JSON lines, and add a gap that names the other lines.

    Args:
        folder: The run's folder.
        name: The file's path in the folder.
        gaps: Receives the gaps.
        expected: Whether a missing file is a gap.
    """
    path = folder / name
    if not path.is_file():
        if path.exists() or path.is_symlink():
            gaps.append(f"{name} is no file")
        elif expected:
            gaps.append(f"{name} is missing")
        return
    damaged: list[int] = []
    try:
        with path.open("rb") as file:
            for line_number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    gaps.append(f"{name} ends in the middle of line {line_number}")
                    break
                record = _record(line)
                if record is None:
                    damaged.append(line_number)
                else:
                    yield record
    except OSError as error:
        gaps.append(f"{name} cannot be read: {error.strerror}")
    if damaged:
        lines = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
        count = "1 damaged line is" if len(damaged) == 1 else f"{len(damaged)} damaged lines are"
        gaps.append(f"{name}: {count} skipped ({lines})")


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
