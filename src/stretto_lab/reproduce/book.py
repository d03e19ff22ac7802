"""Runs that were made, one JSON object per line: an experiment that was stopped goes on where it was."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stretto.errors import DiskError
from stretto_lab.observe import append_json_line, read_json_lines


class Book:
    """The file `runs.jsonl` of a folder, after those in `runs.jsonl.gz`, where results that are kept have been packed.

    Args:
        folder: Made where there is none, when the first run is added.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "runs.jsonl"
        self.runs = read_json_lines(folder / "runs.jsonl.gz") + read_json_lines(self._path)

    def find(self, wanted: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the run whose record agrees with all fields of `wanted`, or None."""
        return next((run for run in self.runs if wanted.items() <= run.items()), None)

    def add(self, run: dict[str, Any]) -> None:
        """Append a run; it is in the file at once.

        Raises:
            DiskError: It cannot be written.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DiskError(f"{self._path.parent} cannot be made: {error.strerror}") from error
        append_json_line(self._path, run)
        self.runs.append(run)
