"""PyTorch's checkpoint files, with a digest of every stored piece.

The bytes in the file are digested, not the values: damage anywhere in a piece is found before anything is unpickled.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from stretto.errors import TornCheckpoint


@dataclasses.dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes in one of a checkpoint's files."""

    file: str
    offset: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """One piece of one entry."""

    name: str
    extent: Extent
    digest: str


@dataclasses.dataclass(frozen=True)
class DigestedResult(WriteResult):
    """What one write left behind, as the coordinator learns it."""

    digest: str


class DigestingWriter(FileSystemWriter):
    """Writes the files, and digests what has arrived in them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.stored: list[Stored] = []
        """Every piece of all ranks, once `finish` has run."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's pieces; see `StorageWriter.write_data`."""
        results = super().write_data(plan, planner).wait()
        digests = _digests(Path(self.path), [_extent(result.storage_data) for result in results])
        future: Future[list[WriteResult]] = Future()
        future.set_result(
            [
                DigestedResult(
                    result.index,
                    result.size_in_bytes,
                    result.storage_data,
                    digests[_extent(result.storage_data)],
                )
                for result in results
            ]
        )
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata; see `StorageWriter.finish`."""
        super().finish(metadata, results)
        self.stored = [
            Stored(result.index.fqn, _extent(result.storage_data), result.digest)
            for of_rank in results
            for result in of_rank
            if isinstance(result, DigestedResult)
        ]


class VerifyingReader(FileSystemReader):
    """Reads the files, and can say beforehand whether what will be read is what was written."""

    def verify(self, plan: LoadPlan, stored: Mapping[Extent, Stored]) -> None:
        """Digest every piece that `plan` reads.

        Raises:
            TornCheckpoint: Names the first entry whose bytes are not those that were written.
        """
        wanted = {
            _extent(self.storage_data[item.storage_index]): item.storage_index.fqn for item in plan.items
        }
        digests = _digests(Path(self.path), wanted)
        for extent, name in wanted.items():
            expected = stored[extent].digest if extent in stored else "no digest at all"
            if digests[extent] != expected:
                raise TornCheckpoint(
                    f"{name!r} is damaged: bytes {extent.offset} to {extent.offset + extent.length} of "
                    f"{Path(self.path) / extent.file} have the xxh3 digest {digests[extent]}, expected {expected}; "
                    "go back to an older checkpoint"
                )


def file_digest(path: Path) -> str:
    """Return the digest of a whole, small file."""
    return xxhash.xxh3_128_hexdigest(path.read_bytes())


def _digests(folder: Path, extents: Iterable[Extent]) -> dict[Extent, str]:
    """Digest runs of bytes, file by file in order; a run that the file is too short for is digested as it is."""
    digests: dict[Extent, str] = {}
    ordered = sorted(extents, key=lambda extent: (extent.file, extent.offset))
    for file in dict.fromkeys(extent.file for extent in ordered):
        try:
            with (folder / file).open("rb") as stream:
                for extent in ordered:
                    if extent.file == file:
                        stream.seek(extent.offset)
                        digests[extent] = xxhash.xxh3_128_hexdigest(stream.read(extent.length))
        except FileNotFoundError as error:
            raise TornCheckpoint(f"{folder / file} is missing; go back to an older checkpoint") from error
    return digests


def _extent(info: object) -> Extent:
    """Return where PyTorch put a piece."""
    return Extent(info.relative_path, info.offset, info.length)  # type: ignore[attr-defined]  # a private class
