"""A file of records, one JSON object per line, that a resumed run continues consistently."""

import json
from pathlib import Path
from typing import Any


class JsonLines:
    """Appends records that have a `step`.

    Every record is handed to the system in one write as soon as it is known, so a killed process loses at most
    the line it was writing.

    Args:
        path: The file.
        keep_until: Keep the records up to this step and go on behind them; None begins anew.
    """

    def __init__(self, path: Path, keep_until: int | None) -> None:
        kept = 0 if keep_until is None else _length_until(path, keep_until)
        # Unbuffered, so that a record is one write.
        self._file = path.open("ab", buffering=0)
        self._file.truncate(kept)

    def write(self, record: dict[str, Any]) -> None:
        """Append `record`."""
        self._file.write(json.dumps(record, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def append_json_line(path: Path, record: dict[str, Any]) -> None:
    """Append one record to a file that is seldom written, and that nothing is ever taken from."""
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(record, allow_nan=False).encode() + b"\n")


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole records of a file; a torn last line is left out, a missing file has none."""
    if not path.exists():
        return []
    return [record for line in path.read_bytes().splitlines(keepends=True) if (record := _record(line))]


def _length_until(path: Path, step: int) -> int:
    """Return the bytes of the leading records whose step is at most `step`."""
    length = 0
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        record = _record(line)
        if record is None or record["step"] > step:
            break
        length += len(line)
    return length


def _record(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    record: dict[str, Any] = json.loads(line)
    return record
