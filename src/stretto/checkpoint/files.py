"""The folders of checkpoints. A rename makes a checkpoint appear or disappear in one moment:

000007-step-350/            a checkpoint, complete from the moment it has this name; the serial number gives
                            the order, also where a run has gone back to an earlier step
.writing-000008-step-400/   one that is being written, or was when its job died
.removing-000004-step-200/  one that is being removed

In a checkpoint are `manifest.json`, without which it is none, and `0.share`, `1.share` and so on, one of each rank.
"""

import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from stretto.checkpoint.manifest import FILE, Manifest
from stretto.disk import doubt, folder_of, make_folder
from stretto.errors import CheckpointError

_log = logging.getLogger("stretto")
_NAME = re.compile(r"\d{6,}-step-\d+")
_WRITING, _REMOVING = ".writing-", ".removing-"
_LEFTOVER = re.compile(rf"(?:{_WRITING}|{_REMOVING}){_NAME.pattern}".replace(".", r"\."))


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """Return the checkpoint in `directory` that was written last, or None; incomplete checkpoints are skipped.

    A checkpoint is complete if every file has its full length. Damage inside files is found by a load.
    """
    return next(complete(directory), None)


def find(directory: Path) -> Path:
    """Return `directory` if it is a checkpoint, otherwise its latest checkpoint; an incomplete one if there is no
    other.

    Raises:
        CheckpointError: There is none.
    """
    if (directory / FILE).is_file() or _NAME.fullmatch(directory.name):
        candidates = [directory] if directory.is_dir() else []
    else:
        candidates = [*complete(directory), *newest_first(directory)]
    if not candidates:
        found = "holds no checkpoint" if directory.is_dir() else "does not exist"
        raise CheckpointError(
            f"{directory} {found}: expected a folder that stretto.checkpoint.save has written to"
        )
    return candidates[0]


def say_doubts(folder: Path) -> None:
    """Log a warning if other users may write into a folder of checkpoints, which a team may want."""
    if (found := doubt(folder)) is not None:
        _log.warning(
            "%s is %s: expected one that user %d alone can write; who can write there chooses the model's values",
            folder, found, os.geteuid(),
        )  # fmt: skip


def complete(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield the complete checkpoints, the last one first."""
    for path in newest_first(directory):
        try:
            Manifest.read(path).check_files(path)
        except CheckpointError:
            continue
        yield path


def begin(directory: Path, step: int) -> str:
    """Make a folder to write into, remove the remains of dead jobs, and return the new checkpoint's name."""
    make_folder(directory)
    for leftover in directory.iterdir():
        if _LEFTOVER.fullmatch(leftover.name):
            _remove(leftover)
    # Whatever has the name of a checkpoint counts, also a file or a link to nowhere: the new name must be free.
    taken = (path for path in directory.iterdir() if _NAME.fullmatch(path.name))
    serial = 1 + max(map(_serial, taken), default=0)
    name = f"{serial:06d}-step-{step}"
    writing(directory, name).mkdir(mode=0o700)
    return name


def _remove(leftover: Path) -> None:
    """Remove an old entry: a folder, a file, or a link to files that are not ours."""
    if leftover.is_dir() and not leftover.is_symlink():
        shutil.rmtree(leftover)
    else:
        leftover.unlink()


def writing(directory: Path, name: str) -> Path:
    """Return the path of a checkpoint until it is committed."""
    return directory / f"{_WRITING}{name}"


def commit(directory: Path, name: str) -> None:
    """Rename a written checkpoint to its final name; from this moment it exists."""
    _sync(writing(directory, name))
    writing(directory, name).rename(directory / name)
    _sync(directory)


def prune(directory: Path, keep: int) -> None:
    """Remove all complete checkpoints except the last `keep`."""
    for old in list(complete(directory))[keep:]:
        removing = directory / f"{_REMOVING}{old.name}"
        old.rename(removing)  # first, so that no half of it is ever taken for a checkpoint
        _remove(removing)


def newest_first(directory: str | os.PathLike[str]) -> list[Path]:
    """Return everything in `directory` that has the name of a checkpoint, the one that was written last first.

    Raises:
        CheckpointError: The folder cannot be read.
    """
    folder = folder_of(directory, "directory")
    try:
        paths = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read: {error.strerror}") from error
    return sorted((path for path in paths if _NAME.fullmatch(path.name)), key=_serial, reverse=True)


def step_of(path: Path) -> int:
    """Return the number of committed updates in a checkpoint, from its name."""
    return int(path.name.rpartition("-")[2])


def _serial(path: Path) -> int:
    return int(path.name.partition("-")[0])


def _sync(folder: Path) -> None:
    """Flush the folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
