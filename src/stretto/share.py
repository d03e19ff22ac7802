"""A share of a state: one rank's part of a job, as the same bytes in files, in memory and on connections.

    mark (8 bytes) | length of the head (8) | digest of the head (16) | head | an entry's content | the next one's | ...

The head is JSON: the settings that are equal on all ranks, and for each entry its name, shape and dtype, the runs of it
that follow each other in its content, and their digest. An entry that is no tensor is packed (`stretto.packed`). Each
content starts at a multiple of 64 bytes, so that a tensor can use the memory of the bytes or of a file.

Digests of the job's values are computed before anything is copied or written, so a later change is found while the job
still has the values. The digest of the head identifies the share, because the head contains the digests of all entries.
"""

import copy
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from stretto.checksums import bytes_of
from stretto.continuation import Continuation, Loader, places
from stretto.engine.state import State
from stretto.errors import TornCheckpoint
from stretto.flat import PartedTensor, Range, Runs
from stretto.optimizer import name_of
from stretto.packed import pack, unpack

_MARK = b"stretto3"
_PREFIX_BYTES, _ALIGNED_BYTES, _MOST_HEAD_BYTES = 32, 64, 2**26
_SETTINGS = ""
"""Name of the content in which all small entries are packed together."""


class Kind(NamedTuple):
    """The kind of tensor of an entry."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def as_json(self) -> list[Any]:
        return [self.shape, str(self.dtype).removeprefix("torch.")]

    @classmethod
    def from_json(cls, fields: Any) -> "Kind":
        """Return the kind from the output of `as_json`.

        Raises:
            ValueError: The value has another form.
        """
        shape, dtype = fields
        found = getattr(torch, text(dtype), None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"{dtype!r} is no dtype")
        return cls(counts(shape), found)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


class Header(NamedTuple):
    """The settings that must be equal on all ranks that hold a state."""

    step: int
    """Number of committed updates."""
    strategy: str
    optimizer: str
    """Name of the optimizer's class."""
    world_size: int
    """Number of ranks that hold the state together."""
    layout: str
    """Digest of the buffers' layout; a job with another layout can read the state."""

    @classmethod
    def from_json(cls, fields: Any) -> "Header":
        """Return the header that JSON stored as a list.

        Raises:
            ValueError: It is not a header.
        """
        step, strategy, optimizer, world_size, layout = fields
        counts([step, world_size])
        return cls(step, text(strategy), text(optimizer), world_size, text(layout))


Kinds = Mapping[str, Kind | None]
"""By name: the kinds of tensors; None for an entry that is not a tensor."""


def kinds_of(entries: Mapping[str, Any]) -> Kinds:
    """Return the kinds of tensors of a state's or a share's entries."""
    return {
        name: Kind(tuple(one.shape), one.dtype) if isinstance(one, Runs | PartedTensor) else None
        for name, one in entries.items()
    }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """One rank's part of a job between updates."""

    header: Header
    entries: Mapping[str, Any]
    """By name: `Runs` of tensors, and other objects; rank 0 holds the objects that are equal on all ranks."""
    unread: dict[str, Callable[[], Any]] = dataclasses.field(default_factory=dict)
    """By name: the reader of an entry that has not been read."""

    def take(self, name: str) -> Any:
        """Return an entry, reading it first if needed.

        Raises:
            TornCheckpoint: It is damaged.
        """
        return self.entries[name] if name not in self.unread else self.unread[name]()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        runs = (one for one in self.entries.values() if isinstance(one, Runs))
        return sum(run.nbytes for one in runs for _, run in one.values)

    def written(self) -> "Written":
        """Return the share that this rank writes, with its digests."""
        contents: list[_Content] = []
        settings = {}
        for name, entry in self.entries.items():
            if isinstance(entry, Runs):
                if own := entry.own.values:
                    contents.append((name, Kind(entry.shape, entry.dtype), own))
            elif type(entry) is bytes:
                contents.append((name, None, [(0, entry)]))
            else:
                settings[name] = entry
        contents.append((_SETTINGS, None, [(0, pack(settings, "a rank's share of the state"))]))
        return Written(self.header, contents)


_Content = tuple[str, Kind | None, Sequence[tuple[int, Tensor | bytes]]]
"""An entry: its name, its kind of tensor, and pieces of it, each with the index of its first element."""


class Written:
    """A share's bytes, piece by piece; values in the host's memory are copied only on request."""

    def __init__(self, header: Sequence[Any], contents: Sequence[_Content]) -> None:
        # A device's values come once: the digest is of what is written.
        contents = [
            (name, kind, [(start, one if isinstance(one, bytes) else one.cpu()) for start, one in pieces])
            for name, kind, pieces in contents
        ]
        index = [
            [
                name,
                kind and kind.as_json(),
                [[start, len(one) if isinstance(one, bytes) else one.numel()] for start, one in pieces],
                _digest_of(_bytes(one) for _, one in pieces),
            ]
            for name, kind, pieces in contents
        ]
        head = json.dumps([header, index]).encode()
        digest = xxhash.xxh3_128(head)
        self.digest = digest.hexdigest()
        """Identifies the share."""
        self._head = _MARK + len(head).to_bytes(8) + digest.digest() + head
        self._contents = [[one for _, one in pieces] for _, _, pieces in contents]

    def chunks(self) -> Iterator[memoryview | bytes]:
        """Yield the bytes in order."""
        yield self._head
        place = len(self._head)
        for pieces in self._contents:
            yield bytes(-place % _ALIGNED_BYTES)
            place += -place % _ALIGNED_BYTES
            for one in pieces:
                content = _bytes(one)
                place += len(content)
                yield content

    def joined(self) -> memoryview:
        """Return a copy of the bytes."""
        return memoryview(bytearray().join(self.chunks()))


def read_share(
    content: bytes | memoryview, where: str, digest: str | None = None, *, whole: bool = True
) -> Held:
    """Return the share in these bytes; its tensors use their memory, unless that is read-only.

    Args:
        content: The share's bytes.
        where: Its name, for messages.
        digest: Its `Written.digest`, if known.
        whole: Whether to read all of it now; otherwise each entry is read on request.

    Raises:
        TornCheckpoint: The bytes are not a share, or are damaged; the message names the entry.
        UnsafeValue: It contains an object that only pickle could read.
    """
    content = memoryview(bytearray(content) if isinstance(content, bytes) else content).cast("B")
    if (size := int.from_bytes(content[8:16])) > _MOST_HEAD_BYTES:
        raise TornCheckpoint(
            f"{where} is damaged: its head has {size} bytes, expected {_MOST_HEAD_BYTES} at most"
        )
    head = content[_PREFIX_BYTES : _PREFIX_BYTES + size]
    found = xxhash.xxh3_128(head)
    if content[:8] != _MARK or content[16:32] != found.digest() or digest not in (None, found.hexdigest()):
        raise TornCheckpoint(
            f"{where} is damaged: its head has the xxh3 digest {found.hexdigest()}, expected "
            f"{digest or bytes(content[16:32]).hex()}; go back to an older checkpoint"
        )
    try:
        fields, index = json.loads(bytes(head))
        header = Header.from_json(fields)
        found_contents = list(_contents(index, _PREFIX_BYTES + len(head)))
        if (end := found_contents[-1][-1]) != len(content):
            raise ValueError(f"expected {end} bytes, found {len(content)}")
    except (ValueError, TypeError, IndexError, RecursionError) as error:
        raise TornCheckpoint(f"{where} is damaged: {error}") from error
    entries: dict[str, Any] = {}
    unread: dict[str, Callable[[], Any]] = {}
    for name, kind, ranges, expected, begin, end in found_contents:
        piece = content[begin:end]
        entry: Any = piece
        if kind is not None:
            values = torch.frombuffer(piece, dtype=kind.dtype) if piece else torch.empty(0, dtype=kind.dtype)
            runs = values.split([stop - start for start, stop in ranges])
            starts = (start for start, _ in ranges)
            entry = Runs(kind.shape, kind.dtype, list(zip(starts, runs, strict=True)), ranges)
        place = f"{name or 'settings'!r} is damaged: bytes {begin} to {end} of {where}"
        read = partial(_compared, entry, piece, expected, place)
        if not name:
            entries |= unpack(read(), f"the part of {where} without tensors")
            continue
        entries[name] = read() if whole else entry
        if not whole:
            unread[name] = read
    return Held(header=header, entries=entries, unread=unread)


def _compared(entry: Any, content: memoryview, expected: str, place: str) -> Any:
    if (actual := _digest_of([content])) != expected:
        raise TornCheckpoint(
            f"{place} have the xxh3 digest {actual}, expected {expected}; go back to an older checkpoint"
        )
    return bytes(entry) if isinstance(entry, memoryview) else entry


def hold(
    continuation: Continuation,
    strategy: str,
    state: State,
    loader: Loader | None,
    extra: Any,
    *,
    copies: bool,
) -> Held:
    """Return this rank's part of a job between updates.

    Args:
        continuation: The job's continuation.
        strategy: The strategy's name.
        state: The result of `continuation.write`.
        loader: This rank's loader, if its position is included.
        extra: The user's value.
        copies: Whether to copy tensors, because the job continues; otherwise they are the job's own and must not
            change.
    """
    job = continuation.job
    is_first = job.everyone.rank == 0
    entries = {
        name: into[key]
        for into, key, name in places(state)
        if is_first or isinstance(into[key], PartedTensor) or name.startswith("optimizer.state.")
    }
    own = continuation.write_own(state, loader, extra)
    entries |= {name: into[key] for into, key, name in places(own)}
    found = {
        name: _copied(value) if copies else value.runs if isinstance(value, PartedTensor) else value
        for name, value in entries.items()
    }
    steps, optimizer = job.compute.rounds.steps, name_of(job.model.optimizer)
    return Held(
        header=Header(steps, strategy, optimizer, job.everyone.world_size, job.layout_digest),
        entries={
            name: value
            for name, value in found.items()
            if not isinstance(value, Runs) or value.values or value.own.values
        },
    )


def _copied(value: Any) -> Any:
    if not isinstance(value, PartedTensor):
        return copy.deepcopy(value)
    runs = value.runs
    copies = [(start, run.detach().clone()) for start, run in runs.values]
    return Runs(runs.shape, runs.dtype, copies, runs.written)


def _contents(index: Any, place: int) -> Iterator[tuple[str, Kind | None, list[Range], str, int, int]]:
    """Yield for each entry the fields of the head, with the first and the last byte of its content.

    Raises:
        ValueError: The head is not valid.
    """
    for name, kind_fields, pieces, digest in index:
        kind = None if kind_fields is None else Kind.from_json(kind_fields)
        ranges: list[Range] = []
        for start, numel in map(counts, pieces):
            # Runs that follow each other are one, so that nobody has to put them together.
            first = ranges.pop()[0] if ranges and ranges[-1][1] == start else start
            ranges.append((first, start + numel))
        if kind is not None and any(stop > math.prod(kind.shape) for _, stop in ranges):
            raise ValueError(f"{text(name)!r} has elements beyond its shape")
        begin = place + -place % _ALIGNED_BYTES
        place = begin + sum(stop - start for start, stop in ranges) * (
            1 if kind is None else kind.dtype.itemsize
        )
        yield text(name), kind, ranges, text(digest), begin, place


def _bytes(value: Tensor | bytes) -> memoryview:
    return memoryview(value) if isinstance(value, bytes) else bytes_of(value).numpy().data


def _digest_of(pieces: Iterable[memoryview]) -> str:
    found = xxhash.xxh3_64()
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


def text(value: object) -> str:
    """Return `value` if it is text.

    Raises:
        ValueError: It is not.
    """
    if not isinstance(value, str):
        raise ValueError(f"expected text, found {str(value)[:40]!r}")
    return value


def counts(values: Any) -> tuple[int, ...]:
    """Return `values` if they are counts: integers from 0 to below 2^63.

    Raises:
        ValueError: They are not.
    """
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise ValueError(f"expected a count, found {str(value)[:40]!r}")
    return tuple(values)
