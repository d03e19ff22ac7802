"""The manifest of a checkpoint: JSON that says which piece of which entry lies where, with a digest of each.

It is all that a reader needs. PyTorch's own `.metadata` says the same for plain PyTorch; it is pickled, so it is
digested here and never opened.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
import xxhash
from torch import Tensor

from stretto.disk import read_whole
from stretto.errors import ForeignCheckpoint, TornCheckpoint

FORMAT = 2
"""Increased whenever an older reader would misread a newer checkpoint."""
FILE = "manifest.json"
METADATA = ".metadata"
"""The file in which PyTorch keeps what lies where."""


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
    offsets: tuple[int, ...] | None
    """Its first element; None for an entry that is no tensor."""
    sizes: tuple[int, ...] | None
    extent: Extent
    digest: str
    """Of the bytes."""

    def as_json(self) -> list[Any]:
        """Return the fields as plain JSON values."""
        extent = self.extent
        return [self.name, self.offsets, self.sizes, extent.file, extent.offset, extent.length, self.digest]

    @classmethod
    def from_json(cls, fields: Any) -> Self:
        """Return what `as_json` wrote.

        Raises:
            ValueError: It is something else.
        """
        name, offsets, sizes, file, offset, length, digest = fields
        return cls(
            text(name),
            None if offsets is None else counts(offsets),
            None if sizes is None else counts(sizes),
            Extent(_file_name(file), *counts([offset, length])),
            text(digest),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class TensorKind:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def as_json(self) -> list[Any]:
        """Return the fields as plain JSON values."""
        return [self.shape, str(self.dtype).removeprefix("torch.")]

    @classmethod
    def from_json(cls, fields: Any) -> Self:
        """Return what `as_json` wrote.

        Raises:
            ValueError: It is something else.
        """
        shape, dtype = fields
        found = getattr(torch, text(dtype), None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"{dtype!r} is no dtype")
        return cls(counts(shape), found)

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether a tensor has this shape and dtype."""
        return self.shape == tuple(tensor.shape) and self.dtype == tensor.dtype

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


Model = Mapping[str, TensorKind | None]
"""What tensors the entries of `model.state_dict()` are, by name; None for one that is no tensor."""


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
    files: Mapping[str, int]
    """Sizes in bytes, by name."""
    metadata_digest: str
    """Of PyTorch's own `.metadata`."""
    entries: Mapping[str, TensorKind | None]
    """Every entry by name, with what tensor it is; None for one that is no tensor."""
    stored: tuple[Stored, ...]
    """Every piece of every entry."""

    def write(self, folder: Path) -> None:
        """Write the file, down to the disk."""
        content = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        content["format"] = FORMAT
        content["entries"] = {
            name: None if kind is None else kind.as_json() for name, kind in self.entries.items()
        }
        content["stored"] = [piece.as_json() for piece in self.stored]
        content["digest"] = _digest(content)
        with (folder / FILE).open("w", encoding="utf-8") as stream:
            json.dump(content, stream)
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
            content = json.loads(read_whole(path))
            if content.pop("digest") != _digest(content):  # in every format, so that damage is told from age
                raise TornCheckpoint(f"{path} is damaged: it does not have the digest that it names")
            version = content.pop("format")
            if version != FORMAT:
                raise ForeignCheckpoint(
                    f"{path} is of format version {version!r}, expected {FORMAT}: read it with the release that wrote "
                    "it"
                )
            return cls._of(content)
        except FileNotFoundError as error:
            raise TornCheckpoint(f"{path} is missing: the checkpoint is incomplete") from error
        except OSError as error:
            raise TornCheckpoint(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise TornCheckpoint(f"{path} is damaged: {error}") from error

    @classmethod
    def _of(cls, content: dict[str, Any]) -> Self:
        """Return the manifest of a decoded file; every field is checked, because anybody can compute a digest."""
        files = {_file_name(name): size for name, size in content["files"].items()}
        counts([*files.values(), content["step"], content["world_size"]])
        stored = tuple(map(Stored.from_json, content["stored"]))
        for piece in stored:
            if piece.extent.offset + piece.extent.length > files.get(piece.extent.file, -1):
                raise ValueError(f"a piece of {piece.name!r} lies outside the file {piece.extent.file!r}")
        return cls(
            step=content["step"],
            world_size=content["world_size"],
            **{name: text(content[name]) for name in ("strategy", "optimizer", "layout", "metadata_digest")},
            files=files,
            entries={
                name: None if kind is None else TensorKind.from_json(kind)
                for name, kind in content["entries"].items()
            },
            stored=stored,
        )

    def check_files(self, folder: Path) -> None:
        """Raise unless all files are there, in full length.

        Raises:
            TornCheckpoint: Names the first file.
        """
        for name, size in self.files.items():
            path = folder / name
            try:
                found = path.stat().st_size if path.is_file() else None
            except OSError as error:
                raise TornCheckpoint(f"{path} cannot be read: {error.strerror}") from error
            if found != size:
                raise TornCheckpoint(
                    f"{path} is {'missing' if found is None else f'{found} bytes long'}, expected {size} bytes; go "
                    "back to an older checkpoint"
                )

    def check_optimizer(self, optimizer: str) -> None:
        """Raise unless the checkpoint holds the state of this kind of optimizer.

        Raises:
            ForeignCheckpoint: Names both.
        """
        if optimizer != self.optimizer:
            raise ForeignCheckpoint(
                f"the checkpoint holds the state of {self.optimizer}, expected {optimizer}: build the optimizer that "
                "was saved, or read the model alone with torch.distributed.checkpoint"
            )


def models(entries: Model) -> Model:
    """Return those of a checkpoint's entries that are the model's, by their names there."""
    prefix = "model."
    return {name.removeprefix(prefix): kind for name, kind in entries.items() if name.startswith(prefix)}


def check_model(saved: Model, model: Model) -> None:
    """Raise unless a saved model has the entries of this one.

    Raises:
        ForeignCheckpoint: Says what differs.
    """
    found = [
        *(f"{name!r} is missing in the checkpoint" for name in model.keys() - saved.keys()),
        *(f"{name!r} is not in the model" for name in saved.keys() - model.keys()),
        *(
            f"{name!r} is {saved[name] or 'no tensor'} in the checkpoint, {model[name] or 'no tensor'} in the model"
            for name in model.keys() & saved.keys()
            if saved[name] != model[name]
        ),
    ]
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise ForeignCheckpoint(
            f"the checkpoint is of another model: {'; '.join(sorted(found)[:5])}{more}: expected the model that was "
            "saved; give buffers that change in training their saved shapes before it is wrapped, or persistent=False"
        )


def text(value: object) -> str:
    """Return `value` if it is text.

    Raises:
        ValueError: It is not.
    """
    if not isinstance(value, str):
        raise ValueError(f"expected text, found {str(value)[:40]!r}")
    return value


def counts(values: Any) -> tuple[int, ...]:
    """Return `values` if they are numbers that count something: whole, not negative, below 2^63.

    Raises:
        ValueError: They are not.
    """
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise ValueError(f"expected a count, found {str(value)[:40]!r}")
    return tuple(values)


def _file_name(value: object) -> str:
    """Return `value` if it names a file in the checkpoint's own folder."""
    name = text(value)
    if name in ("", ".", "..") or Path(name).name != name or "\0" in name:
        raise ValueError(f"{name!r} is no file of the checkpoint")
    return name


def _digest(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
