"""A job's whole state in memory: what each rank holds of it, and another job that goes on from it.

The state is the one that checkpoints write (`stretto.continuation`). Only its way differs: no file lies in between, and
what a rank has already does not move. What some rank lacks travels over the group of the job that goes on, one entry at
a time, from the ranks that would have written it into a checkpoint. So both ways end with the same bits.
"""

import bisect
import copy
import dataclasses
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.continuation import Continuation, Loader, Whole
from stretto.engine.state import State
from stretto.errors import CheckpointError, TornCheckpoint
from stretto.flat import Part, PartedTensor
from stretto.optimizer import name_of
from stretto.packed import pack_elements, unpack_elements

_ROUND_BYTES = 2**25
"""Every rank has room for so much, a few times, beside its state."""
_SMALL_BYTES = 64
"""About what a number takes."""

_LONG_BYTES = 2**16
"""Packed entries of more than that travel as elements."""

Gather = Callable[[bytes], Sequence[bytes]]
"""Returns every rank's record, in rank order."""


@dataclasses.dataclass(frozen=True, slots=True)
class Runs:
    """Runs of a tensor's elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    runs: list[tuple[int, Tensor]]
    """First element, and the values `(numel,)`; disjoint."""
    written: list[bool]
    """Of each run: whether this rank writes it into a checkpoint. Others may hold it too."""

    @property
    def own(self) -> "Runs":
        """Those that this rank writes."""
        runs = [run for run, mine in zip(self.runs, self.written, strict=True) if mine]
        return Runs(self.shape, self.dtype, runs, [True] * len(runs))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What one rank holds of a job at rest."""

    step: int
    """Committed updates."""
    strategy: str
    optimizer: str
    """The name of its class."""
    world_size: int
    """Of the ranks that hold the state together."""
    layout: str
    """Digest of the layout."""
    entries: Mapping[str, Any]
    """By the names that they have in a checkpoint."""

    @property
    def header(self) -> list[Any]:
        """What is the same on all ranks that hold the state."""
        return [self.step, self.strategy, self.optimizer, self.world_size, self.layout]

    def written(self) -> memoryview:
        """Return what the rank would have written into a checkpoint, for `read_share`."""
        plain = {name: entry for name, entry in self.entries.items() if not isinstance(entry, Runs)}
        runs = {name: entry.own for name, entry in self.entries.items() if isinstance(entry, Runs)}
        index = [
            [name, list(entry.shape), str(entry.dtype), [[start, run.numel()] for start, run in entry.runs]]
            for name, entry in runs.items()
        ]
        # A rank's own replica is packed already: to pack it again would copy it four times.
        long = [
            name for name, entry in plain.items() if isinstance(entry, bytes) and len(entry) > _LONG_BYTES
        ]
        packed = [plain.pop(name) for name in long]
        lengths = [[name, len(content)] for name, content in zip(long, packed, strict=True)]
        values = [run for entry in runs.values() for _, run in entry.runs]
        whole = [self.header, plain, index, lengths]
        return pack_elements(whole, values, "a rank's share of the state", packed)


def read_share(content: bytes | memoryview) -> Held:
    """Return the share from which `Held.written` has made these bytes, which stay as they are.

    Raises:
        UnsafeValue: They are something else.
    """
    (header, plain, index, lengths), elements = unpack_elements(content, "a rank's share of the state")
    values = {dtype: found.clone() for dtype, found in elements.items()}
    entries: dict[str, Any] = dict(plain)
    places = dict.fromkeys(values, 0)

    def following(dtype: str, numel: int) -> Tensor:
        places[dtype] += numel
        return values[dtype][places[dtype] - numel : places[dtype]]

    for name, shape, dtype, runs in index:
        found = [(start, following(dtype, numel)) for start, numel in runs]
        entries[name] = Runs(tuple(shape), getattr(torch, dtype.partition(".")[2]), found, [True] * len(runs))
    for name, length in lengths:
        entries[name] = following(str(torch.uint8), length).numpy().tobytes()
    step, strategy, optimizer, world_size, layout = header
    return Held(
        step=step,
        strategy=strategy,
        optimizer=optimizer,
        world_size=world_size,
        layout=layout,
        entries=entries,
    )


def hold(
    continuation: Continuation,
    strategy: str,
    *,
    loader: Loader | None = None,
    extra: Any = None,
    copies: bool,
) -> Held:
    """Return what this rank holds of a job at rest; all ranks must call.

    Args:
        continuation: Of the job.
        strategy: Its name.
        loader: This rank's, if its position is to be held.
        extra: Anything.
        copies: Hold copies, because the job goes on; otherwise its own tensors, which must stay as they are.
    """
    state = continuation.write()
    state.update(continuation.write_own(state, loader, extra))
    job = continuation.job
    return Held(
        step=job.compute.course.steps,
        strategy=strategy,
        optimizer=name_of(job.model.optimizer),
        world_size=job.everyone.world_size,
        layout=job.layout_digest,
        entries={
            name: _entry(value, copies=copies)
            for _, _, name, value in _entries(state)
            if not (
                isinstance(value, PartedTensor) and all(part.value is None for part in value.parts.values())
            )
        },
    )


def check_whole(missing: Sequence[str]) -> None:
    """Check that nothing is missing.

    Raises:
        TornCheckpoint: Something is.
    """
    if missing:
        raise TornCheckpoint(
            f"no ranks together hold all of {len(missing)} entries as this job has them, among them {missing[:3]}: "
            "expected the shares of all ranks, of a job over the same model; go back to a checkpoint"
        )


class Holding:
    """The state that all ranks of a group hold together, whoever wrote which share; all must make one, and read it.

    Args:
        shares: What this rank holds: one share as a rule, several where ranks have left, none on a rank that has come.
        gather: Over the ranks of the job that goes on.
        round_bytes: What all ranks together send in one round at most, unless a value that cannot be cut has more.

    Raises:
        CheckpointError: No rank holds anything, or ranks hold states of different jobs or updates.
    """

    def __init__(self, shares: Sequence[Held], gather: Gather, round_bytes: int = _ROUND_BYTES) -> None:
        self._shares = shares
        self._gather = gather
        told = self._tell([[share.header, list(share.entries)] for share in shares])
        self._most_bytes = round_bytes // len(told)
        headers = [header for found in told for header, _ in found]
        if not headers or headers.count(headers[0]) < len(headers):
            raise CheckpointError(
                f"states in memory: expected shares of one job at one update, found {headers or 'none'} (update, "
                "strategy, optimizer, ranks and layout of each)"
            )
        self.step, self.strategy, self.optimizer, self.world_size, self.layout = headers[0]
        self.names = {name for found in told for _, names in found for name in names}
        """Every entry that some rank holds."""

    def read(self, state: State, *, moves: bool) -> list[str]:
        """Fill the blank entries of `state`; return the names of those of which ranks do not hold all.

        Args:
            state: What this rank needs; see `Continuation.blank`.
            moves: Whether to take everything from the ranks that would have written it: other ranks go on.
        """
        wanted = {name: (into, key) for into, key, name, _ in _entries(state)}
        lacking = sorted(name for name, place in wanted.items() if moves or not _fill(place, self._own(name)))
        lacked = {name for told in self._tell(lacking) for name in told}
        arriving = {name: _Arriving(*wanted[name]) for name in sorted(lacked & wanted.keys())}
        batches = list(self._batches(sorted(lacked)))
        for index in range(max(self._tell(len(batches)))):
            record = _record(batches[index] if index < len(batches) else [])
            for rank, found in enumerate(self._gather(record)):
                for name, *piece in _pieces_of(found):
                    if name in arriving:
                        arriving[name].take(rank, piece)
        return [name for name, entry in arriving.items() if not entry.is_whole()]

    def _batches(self, names: Sequence[str]) -> Iterator[list[Any]]:
        """Yield what this rank's shares would have written of some entries, as much at a time as may travel."""
        batch: list[Any] = []
        size = 0
        for name in names:
            for piece in self._pieces(name):
                more = _size(piece[-1])
                if batch and size + more > self._most_bytes:
                    yield batch
                    batch, size = [], 0
                batch.append([name, *piece])
                size += more
        if batch:
            yield batch

    def _pieces(self, name: str) -> Iterator[list[Any]]:
        """Yield an entry in pieces: its value alone, or shape, dtype, first element and a part of a run."""
        for entry in self._own(name):
            if not isinstance(entry, Runs):
                yield [entry]
                continue
            most = max(1, self._most_bytes // entry.dtype.itemsize)
            for start, run in entry.own.runs:
                flat = run.reshape(-1)
                for begin in range(0, flat.numel(), most):
                    yield [list(entry.shape), str(entry.dtype), start + begin, flat[begin : begin + most]]

    def _own(self, name: str) -> list[Any]:
        """Return what this rank holds of an entry."""
        return [share.entries[name] for share in self._shares if name in share.entries]

    def _tell(self, value: Any) -> list[Any]:
        records = self._gather(zlib.compress(json.dumps(value).encode(), level=1))
        return [json.loads(zlib.decompress(record)) for record in records]


def _entries(state: State) -> Iterator[tuple[dict[str, Any], str, str, Any]]:
    """Yield the entries of nested dictionaries: where each lies, under which key, its name, and its value."""
    for part, entries in state.items():
        if not isinstance(entries, dict):
            yield state, part, part, entries
            continue
        for key, value in entries.items():
            yield entries, key, f"{part}.{key}", value


def _entry(value: Any, *, copies: bool) -> Any:
    if isinstance(value, PartedTensor):
        parts = [part for part in value.parts.values() if part.value is not None]
        runs = [(part.box.start, part.value) for part in parts if part.value is not None]
        held = [(start, run.detach().clone() if copies else run.detach()) for start, run in runs]
        return Runs(tuple(value.shape), value.dtype, held, [part.is_written_here for part in parts])
    value = value.value if isinstance(value, Whole) else value
    return copy.deepcopy(value) if copies else value


def _record(pieces: Sequence[Sequence[Any]]) -> bytes:
    """Return pieces as bytes, for `_pieces_of`."""
    plain = [list(piece) for piece in pieces if len(piece) == 2]
    runs = [piece for piece in pieces if len(piece) > 2]
    index = [[name, shape, dtype, start, part.numel()] for name, shape, dtype, start, part in runs]
    return bytes(pack_elements([plain, index], [part for *_, part in runs], "entries"))


def _pieces_of(record: bytes) -> Iterator[list[Any]]:
    """Yield the pieces of which `_record` has made these bytes."""
    (plain, index), values = unpack_elements(record, "entries")
    yield from plain
    places = dict.fromkeys(values, 0)
    for name, shape, dtype, start, numel in index:
        yield [name, shape, dtype, start, values[dtype][places[dtype] : places[dtype] + numel]]
        places[dtype] += numel


class _Arriving:
    """An entry that comes from other ranks, piece by piece."""

    def __init__(self, into: dict[str, Any], key: str) -> None:
        self._into, self._key = into, key
        self._wanted = into[key] if isinstance(into[key], PartedTensor) else None
        parts = [] if self._wanted is None else self._wanted.parts.values()
        parts = sorted((part for part in parts if part.value is None), key=lambda part: part.box.start)
        self._blanks = [_Blank(part, into[key].dtype) for part in parts]
        self._starts = [part.box.start for part in parts]
        self._fits = True
        self._from: int | None = None

    def take(self, rank: int, piece: Sequence[Any]) -> None:
        """Take a piece that a rank has written; of a value that several have written, the first rank's."""
        if self._wanted is None and len(piece) == 1:
            if self._from is None or rank < self._from:
                self._from, self._into[self._key] = rank, piece[0]
            return
        as_wanted = None if self._wanted is None else [list(self._wanted.shape), str(self._wanted.dtype)]
        if piece[:2] != as_wanted:
            self._fits = False
            return
        _, _, start, run = piece
        first = max(0, bisect.bisect_right(self._starts, start) - 1)
        for blank in self._blanks[first : bisect.bisect_left(self._starts, start + run.numel())]:
            blank.take(start, run)

    def is_whole(self) -> bool:
        """Return whether all has come; its place is filled then."""
        if self._wanted is None:
            return self._fits and self._from is not None
        if not self._fits or not all([blank.is_whole for blank in self._blanks]):
            return False
        for blank in self._blanks:
            blank.fill()
        return True


class _Blank:
    """A part of a tensor, filled run by run."""

    def __init__(self, part: Part, dtype: torch.dtype) -> None:
        self._part = part
        self._value = torch.empty(part.box.numel, dtype=dtype)
        self._runs: dict[int, int] = {}  # first element and length of what has come; disjoint

    def take(self, start: int, run: Tensor) -> None:
        """Take what a run has of it."""
        box = self._part.box
        begin, end = max(start, box.start), min(start + run.numel(), box.start + box.numel)
        if begin < end:
            self._value[begin - box.start : end - box.start] = run[begin - start : end - start]
            self._runs[begin] = max(end - begin, self._runs.get(begin, 0))

    @property
    def is_whole(self) -> bool:
        """Whether all of it has come."""
        place, end = self._part.box.start, self._part.box.start + self._part.box.numel
        for begin, numel in sorted(self._runs.items()):
            if begin > place:
                return False
            place = max(place, begin + numel)
        return place >= end

    def fill(self) -> None:
        """Put it into its place."""
        self._part.fill(self._value)


def _size(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.nbytes
    return len(value) if isinstance(value, bytes) else _SMALL_BYTES


def _fill(place: tuple[Any, Any], found: Sequence[Any]) -> bool:
    """Put an entry into its place, out of what this rank holds of it; return whether all of it is there."""
    into, key = place
    wanted = into[key]
    if not isinstance(wanted, PartedTensor):
        for value in found:
            into[key] = value
            return True
        return False
    runs: dict[int, Tensor] = {}
    for one in found:
        if one.shape != tuple(wanted.shape) or one.dtype != wanted.dtype:
            return False
        for start, run in one.runs:
            runs.setdefault(start, run)  # of several shares that have the same, the first
    blanks = [part for part in wanted.parts.values() if part.value is None]
    values = [_run(runs, part.box.start, part.box.numel, wanted.dtype) for part in blanks]
    whole = [value for value in values if value is not None]
    if len(whole) < len(blanks):
        return False
    for part, value in zip(blanks, whole, strict=True):
        part.fill(value)
    return True


def _run(runs: Mapping[int, Tensor], start: int, numel: int, dtype: torch.dtype) -> Tensor | None:
    """Return `numel` elements from `start` on out of disjoint runs; None if some are missing."""
    if start in runs and runs[start].numel() == numel:
        return runs[start]
    pieces, place = [], start
    for first, run in sorted(runs.items(), key=lambda pair: pair[0]):
        if first <= place < min(first + run.numel(), start + numel):
            piece = run[place - first : start + numel - first]
            pieces.append(piece)
            place += piece.numel()
    if place < start + numel:
        return None
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=dtype)
