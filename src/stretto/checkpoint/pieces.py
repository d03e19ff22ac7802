"""The pieces of a checkpoint: written by PyTorch's planners and writers, digested, and read without unpickling.

Note [From the job to the file]
    Digests of the job's values are taken before anything is written. What lies in the file afterwards is read back and
    compared with them, and the digest that the manifest names is of the bytes that were read and found right. So a
    value that changes on its way (a copy, the serialisation, the disk's cache) is found while the job still has it.

Note [Memory of a save]
    A replica's record is as large as all else of a rank. So records are packed once, where they are made, and lie in
    the file as they are; what is packed here takes the place of what it was made from; and all of it goes once it has
    been written.
"""

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from stretto.checkpoint.manifest import Extent, Manifest, Model, Stored, TensorKind, check_model, models
from stretto.checksums import digest, hexadecimal
from stretto.continuation import Whole
from stretto.engine.state import State
from stretto.errors import CheckpointError, TornCheckpoint
from stretto.packed import pack, unpack

_Value = Tensor | io.BytesIO
_RECORDS = ("owed", "replica")
"""Parts of a state whose entries come packed, and are dictionaries of tensors: large, and plain PyTorch reads them.
Other bytes may be a user's, or hold what it refuses."""


class SavePlanner(DefaultSavePlanner):
    """Plans as PyTorch's does, and refuses values that only pickle could read again."""

    def __init__(self) -> None:
        super().__init__()
        self._packed: dict[str, bytes] = {}
        self._copies: dict[MetadataIndex, Tensor] = {}

    def copy(self, share: SavePlan) -> None:
        """Copy what `share` writes of the job's tensors into the host's memory, and let go of the job's own."""
        found = {item.index: self.resolve_data(item) for item in share.items}
        self._copies = {
            index: value.detach().to("cpu", copy=True)
            for index, value in found.items()
            if isinstance(value, Tensor)
        }
        self.state_dict = {
            name: value for name, value in self.state_dict.items() if not isinstance(value, Tensor)
        }

    def resolve_data(self, write_item: WriteItem) -> _Value:
        """Return what is written of an entry, as the job has it or as it was copied."""
        copied = self._copies.get(write_item.index)
        found: _Value = super().resolve_data(write_item) if copied is None else copied
        return found

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Return what is written of an entry: the bytes of which the digest is taken are those that are written."""
        if write_item.type != WriteItemType.BYTE_IO:
            return object
        name = write_item.index.fqn
        if name not in self._packed:
            value = object.value if isinstance(object, Whole) else object
            self._packed[name] = value if name.partition(".")[0] in _RECORDS else pack(value, repr(name))
            self.state_dict[name] = None  # see Note [Memory of a save]
        return io.BytesIO(self._packed[name])

    def let_go(self) -> None:
        """Keep nothing of what was to be written."""
        self._packed, self._copies, self.state_dict = {}, {}, {}


class LoadPlanner(DefaultLoadPlanner):
    """Plans as PyTorch's does, and reads nothing by pickle."""

    def plan(self, state: State, metadata: Metadata) -> LoadPlan:
        """Return what has to be read for `state`.

        Raises:
            ForeignCheckpoint: The model of the checkpoint is another one.
            ValueError: An entry is missing, or of another kind.
        """
        check_model(models(entry_kinds(metadata)), kinds_of(state["model"]))
        self.set_up_planner(state, metadata)
        return self.create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put an entry that is no tensor into the state; all of its content must be readable, before any is used."""
        name = read_item.dest_index.fqn
        content = value.getvalue()
        found = unpack(content, repr(name))
        *path, last = self.mappings[name]
        part = (*path, last)[0]
        if isinstance(found, bytes) and part not in ("model", "optimizer"):  # there bytes are the user's
            unpack(found, repr(name))
        entries: Any = self.original_state_dict
        for key in path:
            entries = entries[key]
        # Older checkpoints hold records that were packed once more.
        entries[last] = content if part in _RECORDS and not isinstance(found, bytes) else found


class Writer(FileSystemWriter):
    """Writes one rank's pieces into PyTorch's files, and compares what is in them with what the job held.

    Args:
        path: The checkpoint's folder.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._held: dict[MetadataIndex, int] = {}

    def hold(self, plan: SavePlan, planner: SavePlanner) -> None:
        """Take the digests of what the job holds now; see Note [From the job to the file]."""
        self._held = {item.index: _digest_of(planner.resolve_data(item)) for item in plan.items}

    def write(self, plan: SavePlan, planner: SavePlanner) -> list[Stored]:
        """Write the pieces of `plan`.

        Raises:
            CheckpointError: What is in a file is not what the job held.
        """
        results = {result.index: result.storage_data for result in self.write_data(plan, planner).wait()}
        items = {_extent(results[item.index]): item for item in plan.items}
        stored = {
            items[place].index: self._stored(items[place], place, content)
            for place, content in _contents(Path(self.path), items)
        }
        return [stored[item.index] for item in plan.items]

    def _stored(self, item: WriteItem, place: Extent, content: bytes) -> Stored:
        is_tensor = item.tensor_data is not None
        written = _digest_of(unpack(content, repr(item.index.fqn)) if is_tensor else io.BytesIO(content))
        if written != self._held[item.index]:
            raise CheckpointError(
                f"{item.index.fqn!r} changed on its way from the job to {Path(self.path) / place.file}: expected the "
                f"digest {hexadecimal(self._held[item.index])}, which the job's values had, found "
                f"{hexadecimal(written)}; save again, and test this rank's memory"
            )
        chunk = None if item.tensor_data is None else item.tensor_data.chunk
        return Stored(
            item.index.fqn,
            None if chunk is None else tuple(chunk.offsets),
            None if chunk is None else tuple(chunk.sizes),
            place,
            xxhash.xxh3_128_hexdigest(content),
        )

    def describe(self, metadata: Metadata, stored: Iterable[Stored]) -> None:
        """Write PyTorch's own metadata, for plain PyTorch; `stored` are the pieces of all ranks."""
        self.finish(metadata, [[WriteResult(_index(s), s.extent.length, _info(s)) for s in stored]])


class Reader(FileSystemReader):
    """Reads pieces from PyTorch's files, once it is known that they hold the bytes that were written.

    Args:
        path: The checkpoint's folder.
        manifest: Says where they lie.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(path)
        self._pieces = {_index(stored): stored for stored in manifest.stored}
        self.metadata = _metadata(manifest)
        """As PyTorch's planners need it, from the manifest alone."""
        self.set_up_storage_reader(self.metadata, is_coordinator=False)

    def verify(self, plan: LoadPlan) -> None:
        """Digest every piece that `plan` reads.

        Raises:
            TornCheckpoint: Names the first entry whose bytes are not those that were written.
        """
        wanted = {self._pieces[item.storage_index].extent: item.storage_index for item in plan.items}
        for extent, content in _contents(Path(self.path), wanted):
            piece = self._pieces[wanted[extent]]
            found = xxhash.xxh3_128_hexdigest(content)
            if found != piece.digest:
                raise TornCheckpoint(
                    f"{piece.name!r} is damaged: bytes {extent.offset} to {extent.offset + extent.length} of "
                    f"{Path(self.path) / extent.file} have the xxh3 digest {found}, expected {piece.digest}; "
                    "go back to an older checkpoint"
                )


def kinds_of(model: State) -> Model:
    """Return what tensors the entries of a model are."""
    return {
        name: TensorKind(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None
        for name, value in model.items()
    }


def _contents(folder: Path, extents: Iterable[Extent]) -> Iterator[tuple[Extent, bytes]]:
    """Yield runs of bytes, file by file in order; of a run that the file is too short for, what there is."""
    ordered = sorted(extents, key=lambda extent: (extent.file, extent.offset))
    name: str | None = None
    stream: IO[bytes] | None = None
    try:
        for extent in ordered:
            if stream is None or extent.file != name:
                if stream is not None:
                    stream.close()
                name, stream = extent.file, (folder / extent.file).open("rb")
            stream.seek(extent.offset)
            yield extent, stream.read(extent.length)
    except OSError as error:
        raise TornCheckpoint(
            f"{folder / str(name)} cannot be read ({error.strerror}); go back to an older checkpoint"
        ) from error
    finally:
        if stream is not None:
            stream.close()


def _digest_of(value: _Value) -> int:
    """Return the digest of a piece's content, wherever the values lie."""
    if isinstance(value, io.BytesIO):
        return xxhash.xxh3_64_intdigest(value.getvalue())  # a buffer would be a copy
    return digest(value.detach().cpu())


def _metadata(manifest: Manifest) -> Metadata:
    chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in manifest.entries}
    for stored in manifest.stored:
        if stored.offsets is not None and stored.sizes is not None and stored.name in chunks:
            chunks[stored.name].append(
                ChunkStorageMetadata(torch.Size(stored.offsets), torch.Size(stored.sizes))
            )
    return Metadata(
        {
            name: BytesStorageMetadata()
            if kind is None
            else TensorStorageMetadata(
                TensorProperties(dtype=kind.dtype), torch.Size(kind.shape), chunks[name]
            )
            for name, kind in manifest.entries.items()
        },
        storage_data={_index(stored): _info(stored) for stored in manifest.stored},
    )


def _index(stored: Stored) -> MetadataIndex:
    return MetadataIndex(stored.name, stored.offsets)


def _info(stored: Stored) -> _StorageInfo:
    return _StorageInfo(stored.extent.file, stored.extent.offset, stored.extent.length)


def _extent(info: _StorageInfo) -> Extent:
    return Extent(info.relative_path, info.offset, info.length)


def entry_kinds(metadata: Metadata) -> dict[str, TensorKind | None]:
    """Return what tensor every entry is; None for one that is no tensor."""
    return {
        name: TensorKind(tuple(entry.size), entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else None
        for name, entry in metadata.state_dict_metadata.items()
    }
