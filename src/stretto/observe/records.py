"""Records of a run in files: who is told of updates, and the JSON that is written of them.

`updates.jsonl`, `evaluations.jsonl` and `incidents.jsonl` hold one JSON object per line. A run that continues from a
checkpoint drops the records behind it and makes them again, so that the files read as if nothing had happened.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stretto.errors import ConfigError
from stretto.records import Incident, Update


class Observer:
    """Is told of a run on rank 0; must not touch model, optimizer or random states.

    A subclass implements what it wants to hear of; the rest does nothing.
    """

    def updated(self, update: Update, training_seconds: float) -> None:
        """Hear of a committed update, `training_seconds` of training after the start of the run."""

    def noticed(self, incident: Incident) -> None:
        """Hear of damage that was found outside an update; that found in one is in its `incidents`."""

    def evaluated(self, step: int, heldout_loss: float, training_seconds: float) -> None:
        """Hear of the held-out loss after `step` committed updates."""

    def close(self) -> None:
        """End; nothing more will come."""


class Recorder(Observer):
    """Writes the three files of a run.

    Args:
        folder: Where they lie.
        resumed_from: Committed updates of the checkpoint that the run continues from: later updates and evaluations
            are dropped, incidents stay. None begins both files.
    """

    def __init__(self, folder: Path, resumed_from: int | None) -> None:
        self._updates = JsonLines(folder / "updates.jsonl", keep_until=resumed_from)
        self._evaluations = JsonLines(folder / "evaluations.jsonl", keep_until=resumed_from)
        self._incidents = folder / "incidents.jsonl"

    def updated(self, update: Update, training_seconds: float) -> None:
        for incident in update.incidents:
            self.noticed(incident)
        self._updates.write({**update.as_json(), "training_seconds": training_seconds})

    def noticed(self, incident: Incident) -> None:
        append_json_line(self._incidents, incident.as_json())

    def evaluated(self, step: int, heldout_loss: float, training_seconds: float) -> None:
        self._evaluations.write(
            {"step": step, "heldout_loss": heldout_loss, "training_seconds": training_seconds}
        )

    def close(self) -> None:
        self._updates.close()
        self._evaluations.close()


class JsonLines:
    """Appends records that have a `step`.

    Every record is handed to the system as soon as it is known: a killed process loses at most the line that it was
    writing.

    Args:
        path: The file.
        keep_until: Keep the leading records up to this step and go on behind them; None begins anew.

    Raises:
        ConfigError: Among the records to be kept is a line that is not one.
    """

    def __init__(self, path: Path, keep_until: int | None) -> None:
        kept = 0
        if keep_until is not None:
            for line, record in _records(path):
                if record["step"] > keep_until:
                    break
                kept += len(line)
        self._file = path.open("ab")
        self._file.truncate(kept)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append `record`."""
        self._file.write(_line(record))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def append_json_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append `record` to a file that is written seldom, and from which nothing is ever dropped."""
    with path.open("ab") as file:
        file.write(_line(record))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file; a last line that is not complete is left out, a missing file has none.

    Raises:
        ConfigError: A line is not a record.
    """
    return [record for _, record in _records(path)]


def replace_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` in one step, so that no reader ever sees half of it; makes the folder where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    unfinished.replace(path)


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield the complete lines of a file with their records."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            return
        try:
            record: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise ConfigError(
                f"{path}, line {number}: expected one JSON object, found {line[:40]!r} ({error}); restore the file, "
                "or move it away to begin a new one"
            ) from error
        yield line, record
