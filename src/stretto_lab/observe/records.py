"""The observers of a run, and the files that they write.

A run that resumes from a checkpoint removes all records after it and writes them again, so the files read as if the run
had never stopped.
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from stretto.disk import writing_to
from stretto.json_lines import JsonLines
from stretto.records import Incident, Update
from stretto_lab.faults import Application, Fault


def strikes_file(folder: Path, rank: int) -> Path:
    """Return the file with the injected faults of a rank, in the folder of a run."""
    return folder / "strikes" / f"rank-{rank}.jsonl"


class Observer:
    """Receives the events of a run, on rank 0 or on all ranks; it must not change model, optimizer or random states.

    A subclass implements the methods it needs; the others do nothing.
    """

    def updated(self, update: Update, training_seconds: float) -> None:
        """Receive a committed update, `training_seconds` of training after the start of the run."""

    def noticed(self, incident: Incident) -> None:
        """Receive damage that was found outside an update; an update's own damage is in its `incidents`."""

    def evaluated(self, step: int, heldout_loss: float, training_seconds: float) -> None:
        """Receive the held-out loss after `step` committed updates."""

    def close(self) -> None:
        """End; no more events follow."""


class StrikeRecorder(Observer):
    """Writes the injected faults of one rank: a line per fault and update in which it changed values.

    Args:
        path: The file.
        resumed_from: Committed updates of the checkpoint from which the run resumes; later lines are removed.
        applications: All occurrences on this rank so far, in order; the list grows.
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
