"""The manifest of a checkpoint: JSON that says how long each rank's share is, and its digest.

A share describes its own content (`stretto.share`): so ranks exchange nothing about it when they save.
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, Self

import xxhash

from stretto.disk import mapped, new_file, read_whole
from stretto.errors import ForeignCheckpoint, TornCheckpoint
from stretto.share import Held, counts, read_share, text

FORMAT = 3
"""Increased whenever an older reader would misread a newer checkpoint."""
FILE = "manifest.json"
_MOST_BYTES = 2**24
"""Of the file: those of a quarter of a million ranks."""


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """The description of one checkpoint."""

    shares: tuple[tuple[int, str], ...]
    """Of each rank's file, its bytes and its digest. All else is in the shares."""

    def write(self, folder: Path) -> None:
        """Write the file, down to the disk."""
        content = {"shares": self.shares, "format": FORMAT}
        content["digest"] = _digest(content)
        with new_file(folder / FILE) as stream:
            stream.write(json.dumps(content).encode())
            stream.flush()
            os.fsync(stream.fileno())

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the file.

        Raises:
            TornCheckpoint: It is missing, damaged, or cannot be read.
            ForeignCheckpoint: It is of another format version.
        """
        path = folder / FILE
        try:
            content = json.loads(read_whole(path, _MOST_BYTES))
            if content.pop("digest") != _digest(content):  # in every format, so that damage is told from age
                raise TornCheckpoint(
                    f"{path} is damaged: its content does not fit the digest in it; resume from an older checkpoint"
                )
            version = content.pop("format")
            if version != FORMAT:
                raise ForeignCheckpoint(
                    f"{path} is of format version {version!r}, expected {FORMAT}: "
                    + (_OLDER if version in (1, 2) else "read it with the release that wrote it")
                )
            return cls(tuple((counts([size])[0], text(digest)) for size, digest in content["shares"]))
        except FileNotFoundError as error:
            raise TornCheckpoint(f"{path} is missing: the checkpoint is incomplete") from error
        except OSError as error:
            raise TornCheckpoint(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise TornCheckpoint(f"{path} is damaged: {error}") from error

    def check_files(self, folder: Path) -> None:
        """Check that every rank's file is there in full length; raises as `check_file`."""
        for rank in range(len(self.shares)):
            self.check_file(folder, rank)

    def check_file(self, folder: Path, rank: int) -> Path:
        """Return the file of a rank's share, which is there in full length.

        Raises:
            TornCheckpoint: It is not.
        """
        path, size = share_of(folder, rank), self.shares[rank][0]
        try:
            found = path.stat().st_size if path.is_file() else None
        except OSError as error:
            raise TornCheckpoint(f"{path} cannot be read: {error.strerror}") from error
        if found != size:
            raise TornCheckpoint(
                f"{path} is {'missing' if found is None else f'{found} bytes long'}, expected {size} bytes; go back to "
                "an older checkpoint"
            )
        return path

    def share(self, folder: Path, rank: int, *, whole: bool = True) -> Held:
        """Return what a rank has written, `whole` as in `read_share`; tensors are in the file's own memory.

        Raises:
            TornCheckpoint: The file is missing, damaged, or another; names the entry.
        """
        path = self.check_file(folder, rank)
        try:
            found = read_share(mapped(path), str(path), self.shares[rank][1], whole=whole)
        except OSError as error:
            raise TornCheckpoint(
                f"{path} cannot be read ({error.strerror}); go back to an older checkpoint"
            ) from error
        if (ranks := found.header.world_size) != len(self.shares):
            raise TornCheckpoint(
                f"{path} is of {ranks} ranks, expected {len(self.shares)}; go back to an older checkpoint"
            )
        return found


_OLDER = "stretto 0.2 reads it; the page 'gone' of the docs shows how to take parameters, optimizer and step from it"


def share_of(folder: Path, rank: int) -> Path:
    """Return the file in which a rank's share is."""
    return folder / f"{rank}.share"


def _digest(content: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
