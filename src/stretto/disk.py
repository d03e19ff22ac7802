"""Files and folders that are replaced as a whole: a reader sees the old or the new content, never half of it.

Only regular files are read: reading a pipe or a device may never end. Files with a state are readable only by this
user, because a state reveals the model.
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
"""Suffix of a file that is being written, or whose writer has died."""


def folder_of(given: object, argument: str) -> Path:
    """Return the path of a folder that a program passed.

    Args:
        given: The argument.
        argument: Its name, for messages.

    Raises:
        ConfigError: It is not a path.
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
    """Make a folder that only this user can read, unless it exists."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def new_file(path: Path) -> BinaryIO:
    """Make a file that only this user can read, and open it for writing.

    Raises:
        OSError: A file of that name exists, or there is no room.
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
    """Let `write` make a file, then rename it to `path` in one step; makes the folder if it does not exist.

    Raises:
        DiskError: It cannot be written; `path` is unchanged.
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
    """Let `write` make a folder, then rename it to `path` once it is complete; the old folder is removed first.

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
        OSError: It cannot be read, is not a regular file, or has more bytes.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no file")
    if most_bytes is not None and path.stat().st_size > most_bytes:
        raise OSError(errno.EFBIG, f"it has {path.stat().st_size} bytes, expected {most_bytes} at most")
    return path.read_bytes()


def mapped(path: Path) -> memoryview:
    """Return the content of a file as mapped memory: if another process truncates the file, a SIGBUS ends this process.

    Raises:
        OSError: It cannot be read, or is not a regular file.
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
    """Raise a one-line error that names the file or folder that could not be written, and the cause.

    Raises:
        DiskError: The block raised an error of the system or of PyTorch.
    """
    try:
        yield
    except StrettoError:
        raise
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else _full(path, error)
        raise DiskError(f"{path} cannot be written: {reason}") from error


def _full(path: Path, error: Exception) -> str:
    """Return why PyTorch could not write, since its error does not say that a disk is full."""
    found = os.statvfs(path.parent)
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"{text} ({found.f_bavail * found.f_frsize} bytes are free there)"
