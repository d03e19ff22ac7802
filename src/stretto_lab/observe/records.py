"""The observers of a run, and the files that they write.

A run that continues from a checkpoint drops the records after it and makes them again, so that the files read as if
nothing had happened.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from stretto.disk import writing_to
from stretto.json_lines import JsonLines
from stretto.records import Incident, Update
from stretto_lab.faults import Application, Fault


def strikes_file(folder: Path, rank: int) -> Path:
    """Return where the strikes of faults on a rank are in the folder of a run."""
    return folder / "strikes" / f"rank-{rank}.jsonl"


class Observer:
    """Receives the events of a run, on rank 0 or on all ranks; must not touch model, optimizer or random states.

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


class StrikeRecorder(Observer):
    """Writes what faults on purpose did to one rank: a line per fault and update in which it changed values.

    Args:
        path: The file.
        resumed_from: Committed updates of the checkpoint that the run continues from; later lines are dropped.
        applications: Every strike on this rank so far, in order; grows.
    """

    def __init__(self, path: Path, resumed_from: int | None, applications: Sequence[Application]) -> None:
        with writing_to(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._lines = JsonLines(path, keep_until=resumed_from)
        self._applications = applications
        self._written = 0

    def updated(self, update: Update, training_seconds: float) -> None:
        self._write()

    def close(self) -> None:
        """Write the remaining records, and close the file."""
        self._write()
        self._lines.close()

    def _write(self) -> None:
        new = self._applications[self._written :]
        self._written += len(new)
        by_fault: dict[tuple[int, Fault], list[Application]] = defaultdict(list)
        for one in new:
            if one.changed:
                by_fault[one.step + 1, one.fault].append(one)
        for (step, fault), strikes in sorted(by_fault.items(), key=lambda item: item[0][0]):
            elements = sum(one.elements for one in strikes)
            what = {"rank": fault.rank, "site": fault.site, "pattern": fault.pattern}
            self._lines.write({"step": step, **what, "strikes": len(strikes), "elements": elements})
