"""Rows of local files: text, JSON lines, Parquet, or a data set saved by `datasets`. Nothing is downloaded.

`datasets` converts other formats to Arrow files in its cache (`HF_DATASETS_CACHE` names the folder), once for every
version of a file, and maps these into memory. So any row can be read at once, and several ranks share the memory.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from stretto import errors
from stretto.fields import check_at_least, check_fields
from stretto_lab.recipes.task import extra

FORMATS = {
    ".txt": "text",
    ".md": "text",
    ".raw": "text",
    ".json": "json",
    ".jsonl": "json",
    ".parquet": "parquet",
}
"""The format of files by the ending of their names; all files of a folder have one format."""

Unit = Literal["file", "paragraph", "line"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Heldout:
    """The data for evaluation, on which the model is not trained."""

    data: str | None = None
    """Separate held-out files, in one of the formats; None takes files next to the training data, or a share of it."""

    share: float = 0.05
    """Held-out share of the training data, between 0 and 1. The split does not depend on the run's seed."""

    samples: int = 256
    """Blocks that an evaluation reads, at most; it reads the first ones."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, samples=1)
        if not 0 < self.share < 1:
            raise errors.ConfigError(f"share must be between 0 and 1, found {self.share}")


class Sides(NamedTuple):
    """Training data and held-out data; each is a `datasets.Dataset`, or another object that returns rows by index."""

    train: Any
    heldout: Any


def read_rows(place: str, unit: Unit = "file") -> Any:
    """Return the rows of a file or folder, a `datasets.Dataset`.

    Args:
        place: A file, a folder of files of one format (read recursively), or a folder of `save_to_disk`. From a
            dictionary of splits only the split `train` is read; if files are named after splits, only the files of
            train.
        unit: The unit of a row in text files.

    Raises:
        ConfigError: There is no file, no file of a known format, or no readable file.
        MissingExtra: `datasets` is not installed.
    """
    path = Path(place)
    datasets = extra("datasets", "a recipe over local files")
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        with _read(datasets, place):
            rows = datasets.load_from_disk(place)
        if isinstance(rows, datasets.DatasetDict):
            if "train" not in rows:
                raise errors.ConfigError(f"{place} has no split 'train', only {sorted(rows)}")
            rows = rows["train"]
    else:
        kind, files = _files(path)
        settings = {"sample_by": "document" if unit == "file" else unit} if kind == "text" else {}
        with _read(datasets, place):
            # Not `load_dataset`, which tells the hub that it was called, also for files that never were there.
            rows = getattr(datasets.Dataset, f"from_{kind}")(files, **settings)
    if not len(rows):
        raise errors.ConfigError(f"{place} is empty: expected at least one row")
    return rows


def _files(path: Path) -> tuple[str, list[str]]:
    """Return the format of the files at `path`, and their names; empty ones are skipped."""
    if not path.exists():
        raise errors.ConfigError(f"there are no data at {path}: expected a file or a folder")
    found = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    found = [file for file in found if file.suffix.lower() in FORMATS and file.stem.upper() != "README"]
    trained = [file for file in found if file.name.startswith("train")]
    known = {str(file): FORMATS[file.suffix.lower()] for file in trained or found}
    if len(set(known.values())) != 1:
        formats = " and ".join(sorted(set(known.values()))) or "none of them"
        raise errors.ConfigError(
            f"{path} holds {formats}: expected files of one format, with names that end in {', '.join(FORMATS)}"
        )
    files = [file for file in known if Path(file).stat().st_size]
    if not files:
        raise errors.ConfigError(f"{path} is empty: expected at least one row")
    return next(iter(known.values())), files


@contextmanager
def _read(datasets: Any, place: str) -> Iterator[None]:
    """Silence `datasets`, and raise a one-line error for a file that it cannot read.

    Raises:
        ConfigError: Any error of the block: readers of foreign files may raise any error.
    """
    verbosity, had_bars = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    if not hasattr(datasets.utils.tqdm, "_lock"):
        # A bar that nobody sees would make a lock between processes, which a rank that is ended leaves behind.
        datasets.utils.tqdm.set_lock(threading.RLock())
    try:
        yield
    except Exception as error:
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split())[:300]
        raise errors.ConfigError(f"{place} cannot be read: {type(cause).__name__}: {reason}") from error
    finally:
        datasets.logging.set_verbosity(verbosity)
        if not had_bars:
            datasets.enable_progress_bars()


def check_column(rows: Any, place: str, column: str) -> None:
    """Raise unless the rows have `column`.

    Raises:
        ConfigError: They have no such column; the message names the others.
    """
    if column not in rows.column_names:
        raise errors.ConfigError(f"{place} has no column {column!r}, only {', '.join(rows.column_names)}")


def divided(count: int, share: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of training samples and of held-out samples, in ascending order.

    Args:
        count: Number of samples.
        share: Held-out share, between 0 and 1; either side gets at least one sample.
        seed: Seed of the split. It is not the run's seed, so that runs of different seeds can be compared.

    Raises:
        ConfigError: There are fewer than two samples.
    """
    if count < 2:
        raise errors.ConfigError(
            f"{count} sample cannot be divided into training and held-out data: give more samples, or separate "
            "held-out data (heldout.data); if the files are text, documents.unit sets the size of a sample"
        )
    heldout = min(count - 1, max(1, round(count * share)))
    order = np.random.default_rng(seed).permutation(count)
    return np.sort(order[heldout:]), np.sort(order[:heldout])


def read_sides(place: str | None, heldout: Heldout, unit: Unit) -> Sides:
    """Return the training rows and the held-out rows.

    Args:
        place: The place of the rows, as `read_rows` takes it.
        heldout: The held-out data.
        unit: The unit of a row in text files.

    Raises:
        ConfigError: The rows cannot be read, or are too few.
    """
    if place is None:
        raise errors.ConfigError("data is missing: name a file or a folder")
    rows = read_rows(place, unit)
    if heldout.data is not None:
        return Sides(rows, read_rows(heldout.data, unit))
    kept, left_out = divided(len(rows), heldout.share)
    return Sides(rows.select(kept, keep_in_memory=True), rows.select(left_out, keep_in_memory=True))
