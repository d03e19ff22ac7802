"""The records of a run: observers of updates, and the files they write.

A file of results that is written as a whole.

A file of records, one JSON object per line, that a resumed run continues consistently.

Whoever wants to hear of updates and evaluations.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from stretto.records import Incident, Update


def replace_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content`, making the folder where there is none, in one step: a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    unfinished.replace(path)


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


class Observer(Protocol):
    """Hears of a run on one rank; must not touch model, optimizer or random states."""

    def updated(self, update: Update, training_seconds: float) -> None:
        """Take note of a committed update, `training_seconds` of training after the start."""
        ...

    def noticed(self, incident: Incident) -> None:
        """Take note of damage that was found outside an update."""
        ...

    def evaluated(self, step: int, heldout_loss: float, training_seconds: float) -> None:
        """Take note of the held-out loss after `step` committed updates."""
        ...

    def close(self) -> None:
        """End; nothing more will come."""
        ...


class Recorder:
    """Writes `updates.jsonl`, one object per update, and `evaluations.jsonl`, one per evaluation.

    What guards have found goes to `incidents.jsonl` too, and stays there when the run goes back to a checkpoint.

    Args:
        folder: Where both files lie.
        resumed_from: Committed updates of the checkpoint that the run continues from: later records, which the
            run makes again, are dropped. None begins both files.
    """

    def __init__(self, folder: Path, resumed_from: int | None) -> None:
        self._updates = JsonLines(folder / "updates.jsonl", keep_until=resumed_from)
        self._evaluations = JsonLines(folder / "evaluations.jsonl", keep_until=resumed_from)
        self._incidents = folder / "incidents.jsonl"

    def updated(self, update: Update, training_seconds: float) -> None:
        """See `Observer.updated`; `training_seconds` stands beside the update's own fields."""
        for incident in update.incidents:
            self.noticed(incident)
        self._updates.write({**update.as_json(), "training_seconds": training_seconds})

    def noticed(self, incident: Incident) -> None:
        """See `Observer.noticed`."""
        append_json_line(self._incidents, incident.as_json())

    def evaluated(self, step: int, heldout_loss: float, training_seconds: float) -> None:
        """See `Observer.evaluated`."""
        self._evaluations.write(
            {"step": step, "heldout_loss": heldout_loss, "training_seconds": training_seconds}
        )

    def close(self) -> None:
        """Close both files."""
        self._updates.close()
        self._evaluations.close()
