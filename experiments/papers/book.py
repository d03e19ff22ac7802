"""Runs that were made, and the intervals of their numbers; other experiments keep theirs so too."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from scipy import stats

from stretto.errors import DiskError
from stretto_lab.observe import append_json_line, read_json_lines


class Book:
    """The file `runs.jsonl` of a folder, after those in `runs.jsonl.gz`, where results that are kept have been packed.

    A run is one JSON object per line: an experiment that was stopped makes the missing runs alone.

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


class Interval(TypedDict):
    """A mean, and between what it lies; of a single value there is a mean alone."""

    mean: float
    low: NotRequired[float]
    high: NotRequired[float]


def interval(values: Sequence[float]) -> Interval:
    """Return the mean and its 95 % interval by Student's t; of a single value the mean alone."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return {"mean": mean}
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return {"mean": mean, "low": mean - half, "high": mean + half}


def difference(own: Sequence[float], other: Sequence[float]) -> Interval:
    """Return the interval of the paired differences `own - other`."""
    return interval([a - b for a, b in zip(own, other, strict=True)])
