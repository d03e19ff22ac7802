"""A lock that allows one run at a time in a folder: two runs would spoil each other's records and checkpoints.

The lock belongs to the process. The system releases it however the process ends, so a killed run leaves no lock.
"""

import contextlib
import errno
import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stretto.disk import writing_to
from stretto.errors import ConfigError

LOCK = ".lock"
"""The locked file; it stays in the folder, and names the last process that locked it."""
_HELD = (errno.EWOULDBLOCK, errno.EACCES)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Exclude all other runs from `folder` during the block; make the folder if it does not exist.

    On a file system without locks it excludes no process.

    Raises:
        ConfigError: Another run uses the folder.
        DiskError: The folder cannot be written.
    """
    path = folder / LOCK
    with writing_to(path):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                raise ConfigError(
                    f"{folder} is in use by {_holder(descriptor)}: expected no run in it; wait for the end of "
                    "that run or stop it, or name another --run-dir"
                ) from error
        with contextlib.suppress(OSError):  # the lock counts, and not what the file says
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    found = ""
    with contextlib.suppress(OSError):
        found = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
    return f"another run ({found})" if found else "another run"
