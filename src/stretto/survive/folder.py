"""Shares in files of one machine, where they outlive processes: in its memory (`/dev/shm`), or on its own disk.

A file has the name of its share, with its digest, and appears under it whole. Processes of one machine may have one
folder: each writes what it holds, and one that starts reads what all have written. A file is mapped into the process's
memory, so a share in `/dev/shm` takes its room once.

Another user who can write there could choose the model's values, so a folder that others own or can write is refused.
Links, and entries with other names, are neither read nor removed.
"""

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from stretto.disk import doubt, make_folder, mapped, new_file
from stretto.errors import CheckpointError
from stretto.survive.shares import Generation, Share, named

_PART = ".part"
"""Suffix of the name of an incomplete file, after the name of its share and a unique part."""
_WHOLE = "stretto-was-whole"
"""The file that records that all ranks have kept a generation."""


class Folder:
    """The shares of one machine's processes of one job.

    Args:
        path: The folder; made if needed, for this user alone, because a state reveals the model.

    Raises:
        CheckpointError: It cannot be made, or is a link, or another user's, or others can write there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._make()
        except OSError as error:
            raise CheckpointError(
                f"{path}: no folder for states of this machine ({error.strerror})"
            ) from error

    @property
    def was_whole(self) -> bool:
        """Return whether, as far as processes of this machine knew, a generation has been complete."""
        return (self.path / _WHOLE).exists()

    def note_whole(self) -> None:
        """Record that a generation has been complete."""
        (self.path / _WHOLE).touch(mode=0o600)

    def shares(self) -> Iterator[tuple[Generation, int, Share]]:
        """Yield every share with its owner; no process may write meanwhile."""
        for path in sorted(self.path.iterdir()):
            name = path.name.removesuffix(_PART)
            found = named(name if name == path.name else name.rpartition(".")[0])
            if found is None or path.is_symlink() or not path.is_file():
                continue
            if name != path.name:
                path.unlink(missing_ok=True)  # of a process that has ended amid it
                continue
            generation, owner, owners, digest = found
            yield generation, owner, Share(owners, digest, mapped(path))

    def write(self, generation: Generation, owner: int, share: Share) -> Share:
        """Write a share; return it as read from the file.

        Raises:
            CheckpointError: There is no room.
        """
        path = self.path / share.name(generation, owner)
        # Processes of several containers may write the same share.
        part = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_PART}")
        try:
            self._make()  # what looks after `/dev/shm` may have removed it
            with new_file(part) as file:
                file.write(share.content)
            part.replace(path)
            return Share(share.owners, share.digest, mapped(path))
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            at = os.statvfs(self.path)
            free, whole = (blocks * at.f_frsize / 1e6 for blocks in (at.f_bavail, at.f_blocks))
            raise CheckpointError(
                f"{self.path}: a share of {len(share.content) / 1e6:,.3f} MB cannot be written "
                f"({error.strerror}): {free:,.3f} MB of {whole:,.3f} MB are free. A rank needs room for six "
                "shares; give the container more memory (docker run --shm-size), or name another folder"
            ) from error

    def _make(self) -> None:
        with contextlib.suppress(FileExistsError):
            make_folder(self.path)
        found = doubt(self.path) or (None if self.path.is_dir() else "no folder")
        if found is not None:
            raise CheckpointError(
                f"{self.path}: expected a folder that user {os.geteuid()} alone can write, for states of this machine, "
                f"found {found}; name another folder, which Stretto then makes"
            )

    def drop(self, generation: Generation, owner: int, share: Share) -> None:
        """Remove a share; processes that have mapped it can still read it."""
        (self.path / share.name(generation, owner)).unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove the record that a generation has been complete."""
        (self.path / _WHOLE).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder, once the last process of this machine has dropped its shares."""
        with contextlib.suppress(OSError):  # another one's are there, or somebody else's files
            self.path.rmdir()
