"""Files and folders that are replaced whole: a reader sees the old one or the new one, never half of one.

And read only where they are files: reading a pipe or a device may never end. Files with a state are made for this
user alone: a state is as good as the model.
"""

import contextlib
import errno
import mmap
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from stretto.errors import ConfigError, DiskError, StrettoError
from stretto.fields import shown

UNFINISHED = ".unfinished"
"""Ends the name of a file that is being written, or was when its process died."""


def folder_of(given: object, argument: str) -> Path:
    """Return the path of a folder that a program has given.

    Args:
        given: The argument.
        argument: Its name, for messages.

    Raises:
        ConfigError: It is no path.
    """
    try:
        path = Path(given)  # type: ignore[arg-type]  # is it one?
        os.fsencode(path)
    except (TypeError, UnicodeEncodeError):
        path = None
    if path is None or "\0" in str(path):
        raise ConfigError(f"{argument}: expected the path of a folder, found {shown(given)}")
    return path


def make_folder(path: Path) -> None:
    """Make a folder for this user alone, unless it is there."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def new_file(path: Path) -> BinaryIO:
    """Make a file for this user alone, and open it for writing.

    Raises:
        OSError: There is something of that name, or no room.
    """
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def doubt(path: Path) -> str | None:
    """Return why other users may write into a folder, in words; None if they may not.

    Raises:
        OSError: There is no such folder.
    """
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        return "a link"
    if found.st_uid != os.geteuid():
        return f"the folder of user {found.st_uid}"
    if found.st_mode & 0o022:
        return f"a folder that others can write (mode {found.st_mode & 0o777:03o})"
    return None


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file, and give it the name `path` in one moment; makes the folder where there is none.

    Raises:
        DiskError: It cannot be written; `path` is what it was.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    with writing_to(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(unfinished)
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            unfinished.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise


def replace_folder(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a folder, and give it the name `path` once it is whole; the old folder is removed before.

    Raises:
        DiskError: It cannot be written.
    """
    unfinished = path.with_name(path.name + UNFINISHED)
    with writing_to(path):
        shutil.rmtree(unfinished, ignore_errors=True)
        write(unfinished)
        if path.exists():
            shutil.rmtree(path)
        unfinished.rename(path)


def read_whole(path: Path, most_bytes: int | None = None) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: It cannot be read, is no file, or has more bytes.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no file")
    if most_bytes is not None and path.stat().st_size > most_bytes:
        raise OSError(errno.EFBIG, f"it has {path.stat().st_size} bytes, expected {most_bytes} at most")
    return path.read_bytes()


def mapped(path: Path) -> memoryview:
    """Return the content of a file, in its own memory: who cuts the file meanwhile ends this process by a SIGBUS.

    Raises:
        OSError: It cannot be read, or is no file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no file")
        if not found.st_size:
            return memoryview(b"")
        # Nobody writes into it, but PyTorch warns of memory that cannot be written.
        return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))
    finally:
        os.close(descriptor)


@contextmanager
def writing_to(path: Path) -> Iterator[None]:
    """Say in one line which file or folder could not be written, and why.

    Raises:
        DiskError: An error of the system, or of PyTorch, left the block.
    """
    try:
        yield
    except StrettoError:
        raise
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else _full(path, error)
        raise DiskError(f"{path} cannot be written: {reason}") from error


def _full(path: Path, error: Exception) -> str:
    """Return why PyTorch could not write: it does not say that a disk is full."""
    found = os.statvfs(path.parent)
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"{text} ({found.f_bavail * found.f_frsize} bytes are free there)"
