"""Records of a run in files: who is told of updates, and the JSON that is written of them.

`updates.jsonl`, `evaluations.jsonl`, `memory.jsonl` and `incidents.jsonl` hold one JSON object per line. So does
`strikes/rank-R.jsonl` of a run with faults on purpose. A run that continues from a checkpoint drops the records behind
it and makes them again, so that the files read as if nothing had happened.
"""

import errno
import gzip
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from io import FileIO
from pathlib import Path
from typing import Any

from stretto.disk import read_whole, replace_file, writing_to
from stretto.errors import ConfigError
from stretto.records import Incident, Update, plain
from stretto_lab.faults import Application, Fault


def strikes_file(folder: Path, rank: int) -> Path:
    """Return where the strikes of faults on a rank lie in the folder of a run."""
    return folder / "strikes" / f"rank-{rank}.jsonl"


class Observer:
    """Is told of a run, on rank 0 or on all ranks; must not touch model, optimizer or random states.

    A subclass implements what it wants to hear of; the rest does nothing.
    """

    def begins(self, loop: Any) -> None:
        """Hear that training begins, before the first evaluation; a trace puts its hooks into the loop."""

    def updated(self, update: Update, training_seconds: float) -> None:
        """Hear of a committed update, `training_seconds` of training after the start of the run."""

    def noticed(self, incident: Incident) -> None:
        """Hear of damage that was found outside an update; that found in one is in its `incidents`."""

    def evaluated(self, step: int, heldout_loss: float, training_seconds: float) -> None:
        """Hear of the held-out loss after `step` committed updates."""

    def close(self) -> None:
        """End; nothing more will come."""


class Recorder(Observer):
    """Writes the files of a run; that of memory has a line for each update in which more was in use than ever.

    Args:
        folder: Where they lie.
        resumed_from: Committed updates of the checkpoint that the run continues from: later updates and evaluations
            are dropped, incidents stay. None begins all files anew.
        peak_bytes: Returns the most memory that was in use so far on this rank.
    """

    def __init__(self, folder: Path, resumed_from: int | None, peak_bytes: Callable[[], int]) -> None:
        with ExitStack() as opened:  # one that is damaged must not leave the others open
            self._updates, self._evaluations, self._memory = (
                opened.enter_context(closing(JsonLines(folder / f"{name}.jsonl", keep_until=resumed_from)))
                for name in ("updates", "evaluations", "memory")
            )
            opened.pop_all()
        self._incidents = folder / "incidents.jsonl"
        self._peak_bytes = peak_bytes
        self._most_bytes = 0

    def updated(self, update: Update, training_seconds: float) -> None:
        for incident in update.incidents:
            self.noticed(incident)
        self._updates.write({**update.as_json(), "training_seconds": training_seconds})
        # A file of its own, because the others are equal to the last byte when a simulation is made again.
        if (peak_bytes := self._peak_bytes()) > self._most_bytes:
            self._most_bytes = peak_bytes
            self._memory.write({"step": update.step, "peak_bytes": peak_bytes})

    def noticed(self, incident: Incident) -> None:
        append_json_line(self._incidents, incident.as_json())

    def evaluated(self, step: int, heldout_loss: float, training_seconds: float) -> None:
        self._evaluations.write(
            {"step": step, "heldout_loss": heldout_loss, "training_seconds": training_seconds}
        )

    def close(self) -> None:
        self._updates.close()
        self._evaluations.close()
        self._memory.close()


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
        """Write what is left, and close the file."""
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


class JsonLines:
    """Appends records that have a `step`.

    Every record is handed to the system as soon as it is known: a killed process loses at most the line that it was
    writing. A record that a full disk takes only in part is taken back, so that no two records are ever joined.

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
                if not _step_of(record, path) <= keep_until:
                    break
                kept += len(line)
        self._path = path
        with writing_to(path):
            self._file = path.open("ab", buffering=0)
            self._file.truncate(kept)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append `record`.

        Raises:
            DiskError: It cannot be written; the file ends behind the record before.
        """
        with writing_to(self._path):
            _append(self._file, record)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def append_json_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append `record` to a file that is written seldom, and from which nothing is ever dropped.

    A half line, which a killed process has left, is cut off first. Errors are those of `JsonLines.write`.
    """
    with writing_to(path), path.open("ab", buffering=0) as file:
        file.truncate(sum(len(line) for line, _ in _records(path)))
        _append(file, record)


def replace_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` in one step, as a record is written; the errors are those of `replace_file`."""
    text = json.dumps(plain(content), indent=2, allow_nan=False) + "\n"
    replace_file(path, lambda unfinished: unfinished.write_text(text))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file; a last line that is no record is left out, a missing file has none.

    A file whose name ends in `.gz` is unpacked.

    Raises:
        ConfigError: A line is not a record.
    """
    return [record for _, record in _records(path)]


def _step_of(record: Mapping[str, Any], path: Path) -> int:
    """Return the step of a record of a file whose records have one."""
    step = record.get("step")
    if type(step) is not int:
        raise ConfigError(
            f"{path}: expected records with a step, found {str(dict(record))[:60]}; restore the file, or move it "
            "away to begin a new one"
        )
    return step


def _append(file: FileIO, record: Mapping[str, Any]) -> None:
    """Append the whole record, or nothing of it; None stands for numbers that are not finite."""
    line = json.dumps(plain(record), allow_nan=False).encode() + b"\n"
    end = os.fstat(file.fileno()).st_size
    try:
        written = file.write(line)
        if written != len(line):
            raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes were taken; is the disk full?")
    except OSError:
        file.truncate(end)
        raise


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield the complete lines of a file with their records."""
    try:
        content = gzip.decompress(read_whole(path)) if path.suffix == ".gz" else read_whole(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    lines = content.splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            return
        try:
            record = json.loads(line)
            if type(record) is not dict:
                raise ValueError("it is no object")
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                return  # two halves, of which the first was written by a process that died
            raise ConfigError(
                f"{path}, line {number}: expected one JSON object, found {line[:40]!r} ({error}); restore the file, "
                "or move it away to begin a new one"
            ) from error
        yield line, record
