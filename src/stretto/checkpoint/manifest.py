"""What a checkpoint says about itself: `manifest.json`, the file without which it is none."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import xxhash

from stretto.checkpoint.storage import Extent, Stored
from stretto.errors import ForeignCheckpoint, TornCheckpoint

FORMAT = 1
"""Raised whenever what an older reader would make of a newer checkpoint is wrong."""
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
