"""The files of a checkpoint: PyTorch's own, a manifest with a digest of every stored piece, and the folder's name.

The digests are over the bytes in the files, not over values, so that damage is found before anything is unpickled. A
folder without `manifest.json` is not a checkpoint. A rename makes a checkpoint appear or disappear in one moment:

000007-step-350/            a checkpoint, complete from the moment it has this name; the serial number gives
                            the order, also where a run has gone back to an earlier step
.writing-000008-step-400/   one that is being written, or was when its job died
.removing-000004-step-200/  one that is being removed
"""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from stretto.errors import CheckpointError, ForeignCheckpoint, TornCheckpoint


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
    """The result of one write, as the coordinator receives it, with the digest of the bytes written."""

    digest: str


class DigestingWriter(FileSystemWriter):
    """Writes PyTorch's files, and digests the bytes that are in them afterwards."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.stored: list[Stored] = []
        """Every piece of all ranks, once `finish` has run."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's pieces as PyTorch does, and return their digests too."""
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
        """Write the metadata as PyTorch does, and collect the pieces of all ranks."""
        super().finish(metadata, results)
        self.stored = [
            Stored(result.index.fqn, _extent(result.storage_data), result.digest)
            for of_rank in results
            for result in of_rank
            if isinstance(result, DigestedResult)
        ]


class VerifyingReader(FileSystemReader):
    """Reads PyTorch's files, and can first verify that they hold the bytes that were written."""

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


FORMAT = 1
"""Increased whenever an older reader would misread a newer checkpoint."""
FILE = "manifest.json"

Tensors = dict[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of every tensor of `model.state_dict()`, by name."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The description of one checkpoint."""

    step: int
    """Committed updates behind it."""
    world_size: int
    strategy: str
    optimizer: str
    """Class of the user's optimizer."""
    layout: str
    """Digest of the layout that the ranks had agreed on; for comparison by eye, any other layout can read it."""
    model: Tensors
    files: Mapping[str, int]
    """Sizes in bytes, by name."""
    metadata_digest: str
    """Of PyTorch's own `.metadata`."""
    stored: tuple[Stored, ...]
    """Every piece of every entry."""

    def write(self, folder: Path) -> None:
        """Write the file, down to the disk."""
        content = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        content["format"] = FORMAT
        content["stored"] = [
            [s.name, s.extent.file, s.extent.offset, s.extent.length, s.digest] for s in self.stored
        ]
        content["digest"] = _digest(content)
        with (folder / FILE).open("w", encoding="utf-8") as stream:
            json.dump(content, stream)
            stream.flush()
            os.fsync(stream.fileno())

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the file.

        Raises:
            TornCheckpoint: It is missing or damaged.
            ForeignCheckpoint: It is of another format version.
        """
        path = folder / FILE
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            version = content.pop("format")
            if version != FORMAT:
                raise ForeignCheckpoint(
                    f"{path} is of format version {version}, expected {FORMAT}: read it with the release that wrote it"
                )
            if content.pop("digest") != _digest({**content, "format": version}):
                raise TornCheckpoint(f"{path} is damaged: it does not have the digest that it names")
            content["stored"] = tuple(
                Stored(name, Extent(*extent), digest) for name, *extent, digest in content["stored"]
            )
            content["model"] = {n: (tuple(shape), dtype) for n, (shape, dtype) in content["model"].items()}
            return cls(**content)
        except FileNotFoundError as error:
            raise TornCheckpoint(f"{path} is missing: the checkpoint is incomplete") from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise TornCheckpoint(f"{path} is damaged: {error}") from error

    def check_files(self, folder: Path) -> None:
        """Raise unless all files are there, in full length.

        Raises:
            TornCheckpoint: Names the first file.
        """
        for name, size in self.files.items():
            path = folder / name
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                raise TornCheckpoint(
                    f"{path} is {'missing' if found is None else f'{found} bytes long'}, expected {size} bytes; go "
                    "back to an older checkpoint"
                )

    def check_model(self, model: Tensors, optimizer: str) -> None:
        """Raise unless the checkpoint is of this model and this kind of optimizer.

        Raises:
            ForeignCheckpoint: Says what differs.
        """
        found = [
            *(f"{name!r} is missing in the checkpoint" for name in model.keys() - self.model.keys()),
            *(f"{name!r} is not in the model" for name in self.model.keys() - model.keys()),
            *(
                f"{name!r} is {_words(self.model[name])} in the checkpoint, {_words(model[name])} in the model"
                for name in model.keys() & self.model.keys()
                if self.model[name] != model[name]
            ),
        ]
        if found:
            more = f" and {len(found) - 5} more" if len(found) > 5 else ""
            raise ForeignCheckpoint(
                f"the checkpoint is of another model: {'; '.join(sorted(found)[:5])}{more}"
            )
        if optimizer != self.optimizer:
            raise ForeignCheckpoint(
                f"the checkpoint holds the state of {self.optimizer}, expected {optimizer}: build the optimizer that "
                "was saved, or read the model alone with torch.distributed.checkpoint"
            )


def _words(tensor: tuple[tuple[int, ...], str]) -> str:
    shape, dtype = tensor
    return f"{dtype} of shape {shape}"


def _digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


_NAME = re.compile(r"\d{6,}-step-\d+")
_WRITING, _REMOVING = ".writing-", ".removing-"


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """Return the checkpoint in `directory` that was written last, or None; incomplete ones are passed over.

    Completeness means that every file is there in full length. Damage inside them shows when it is loaded.
    """
    return next(complete(Path(directory)), None)


def find(directory: Path) -> Path:
    """Return `directory` if it is a checkpoint, otherwise the latest one in it; an incomplete one if there is no other.

    Raises:
        CheckpointError: There is none.
    """
    if (directory / FILE).is_file() or _NAME.fullmatch(directory.name):
        candidates = [directory] if directory.is_dir() else []
    else:
        candidates = [*complete(directory), *_newest_first(directory)]
    if not candidates:
        found = "holds no checkpoint" if directory.is_dir() else "does not exist"
        raise CheckpointError(
            f"{directory} {found}: expected a folder that stretto.checkpoint.save has written to"
        )
    return candidates[0]


def complete(directory: Path) -> Iterator[Path]:
    """Yield the complete checkpoints, the last one first."""
    for path in _newest_first(directory):
        try:
            Manifest.read(path).check_files(path)
        except CheckpointError:
            continue
        yield path


def begin(directory: Path, step: int) -> str:
    """Make a folder to write into, clear away what dead jobs have left, and return the new checkpoint's name."""
    directory.mkdir(parents=True, exist_ok=True)
    for pattern in (_WRITING, _REMOVING):
        for leftover in directory.glob(f"{pattern}*"):
            shutil.rmtree(leftover)
    serial = 1 + max(map(_serial, _newest_first(directory)), default=0)
    name = f"{serial:06d}-step-{step}"
    writing(directory, name).mkdir()
    return name


def writing(directory: Path, name: str) -> Path:
    """Return where a checkpoint lies until it is committed."""
    return directory / f"{_WRITING}{name}"


def commit(directory: Path, name: str) -> None:
    """Rename a written checkpoint to its final name; from this moment it exists."""
    _sync(writing(directory, name))
    writing(directory, name).rename(directory / name)
    _sync(directory)


def abandon(directory: Path, name: str) -> None:
    """Remove a checkpoint that could not be written."""
    shutil.rmtree(writing(directory, name), ignore_errors=True)


def prune(directory: Path, keep: int) -> None:
    """Remove all complete checkpoints but the last `keep`."""
    for old in list(complete(directory))[keep:]:
        removing = directory / f"{_REMOVING}{old.name}"
        old.rename(removing)  # first, so that no half of it is ever taken for a checkpoint
        shutil.rmtree(removing)


def _newest_first(directory: Path) -> list[Path]:
    paths = [path for path in directory.iterdir() if path.is_dir()] if directory.is_dir() else []
    return sorted((path for path in paths if _NAME.fullmatch(path.name)), key=_serial, reverse=True)


def _serial(path: Path) -> int:
    return int(path.name.partition("-")[0])


def _sync(folder: Path) -> None:
    """Flush the folder's entries to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
