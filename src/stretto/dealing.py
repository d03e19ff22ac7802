"""Deals a state that ranks hold together out to the ranks that need it, from files or memory.

Parts that a rank already has are not sent. Missing parts are sent over the group of the continuing job, one entry at a
time, by the ranks that write them.
"""

import dataclasses
import json
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

from torch import Tensor

from stretto.continuation import places
from stretto.engine.state import State
from stretto.errors import CheckpointError, ForeignCheckpoint, TornCheckpoint
from stretto.flat import PartedTensor, Range, Runs
from stretto.share import Header, Held, Kind, Kinds, kinds_of, read_share

_ROUND_BYTES = 2**25
"""Bytes that one round sends; every rank has room for a few times this, on top of its state."""
_SMALL_BYTES = 64
"""Approximate bytes of a number."""

T = TypeVar("T")

Gather = Callable[[bytes], Sequence[bytes]]
"""Returns every rank's record, in rank order."""


def check_whole(missing: Sequence[str]) -> None:
    """Raise unless nothing is missing.

    Raises:
        TornCheckpoint: An entry is missing.
    """
    if missing:
        raise TornCheckpoint(
            f"the shares of all ranks do not cover {len(missing)} entries of this job, among them {missing[:3]}: "
            "expected the shares of all ranks, of a job over the same model; resume from a checkpoint"
        )


class Holding:
    """The state that all ranks of a group hold together, split in any way; all ranks must make and read it.

    Args:
        shares: The shares on this rank: usually one, several if ranks have left, none on a new rank.
        gather: Over the ranks of the continuing job.
        round_bytes: Most bytes that all ranks together send in one round, unless a value that cannot be cut is larger.

    Raises:
        CheckpointError: No rank has a share, or shares belong to different jobs or updates.
    """

    def __init__(self, shares: Sequence[Held], gather: Gather, round_bytes: int = _ROUND_BYTES) -> None:
        self._shares = shares
        self._gather = gather
        told = self._tell(
            [
                [one.header, one.num_bytes, {n: k and k.as_json() for n, k in kinds_of(one.entries).items()}]
                for one in shares
            ]
        )
        self._most_bytes = round_bytes // len(told)
        headers = [Header(*header) for found in told for header, *_ in found]
        if not headers or headers.count(headers[0]) < len(headers):
            raise CheckpointError(
                f"expected shares of one job at one update, found {[*map(list, headers)] or 'none'} (update, "
                "strategy, optimizer, ranks and layout of each)"
            )
        self.header = headers[0]
        kinds = {name: kind for found in told for *_, kinds in found for name, kind in kinds.items()}
        self.names = set(kinds)
        """All entries that some rank holds."""
        self.model = {name: kind and Kind.from_json(kind) for name, kind in models(kinds).items()}
        """The kind of tensor of each model entry."""
        num_bytes = sum(num_bytes for found in told for _, num_bytes, _ in found)
        # Checked before a tensor of that size is made.
        if any(kind is not None and kind.num_bytes > num_bytes for kind in self.model.values()):
            raise TornCheckpoint(
                "a share names a larger tensor than all shares together hold: expected the shares of all "
                "ranks; resume from a checkpoint"
            )

    def check(self, optimizer: str, model: State) -> None:
        """Raise unless the state belongs to a job with this optimizer and model.

        Raises:
            ForeignCheckpoint: It does not; the message names the difference.
        """
        if optimizer != self.header.optimizer:
            raise ForeignCheckpoint(
                f"the checkpoint holds the state of {self.header.optimizer}, expected {optimizer}: build the optimizer "
                "that was saved"
            )
        check_model(self.model, kinds_of(model))

    def leave_out(self, blank: State) -> list[str]:
        """Drop entries that do not fit a job with such a state, and return their names."""
        kinds = kinds_of(blank["model"])
        differing = differences(self.model, kinds)
        if not differing:
            return []
        self.model = {name: kind for name, kind in self.model.items() if kinds.get(name, 0) == kind}

        def fits(name: str) -> bool:
            part, _, rest = name.partition(".")
            if part in ("model", "master"):
                return rest in self.model
            if part == "optimizer" and rest.startswith("state."):
                return rest.removeprefix("state.").rpartition(".")[0] in self.model
            return part in ("optimizer", "extra", "scheduler") or (part == "job" and rest != "round_report")

        self.names = set(filter(fits, self.names))
        return differing

    def read(self, state: State, *, moves: bool) -> list[str]:
        """Fill the blank entries of `state`; return the names of entries that the ranks do not hold completely.

        Args:
            state: What this rank needs; see `Continuation.blank`.
            moves: Whether to receive all parts from the ranks that write them, because other ranks continue.
        """
        wanted = {name: (into, key) for into, key, name in places(state)}
        lacking = sorted(name for name, place in wanted.items() if moves or not self._fill(name, *place))
        lacked = sorted({name for told in self._tell(lacking) for name in told})
        arrived: dict[str, list[Any]] = {name: [] for name in lacked if name in wanted}
        batches = [batch for share in self._shares for batch in self._batches(share, lacked)]
        for index in range(max(self._tell(len(batches)))):
            batch = batches[index] if index < len(batches) else None
            for record in self._gather(b"" if batch is None else batch.written().joined().tobytes()):
                found = (
                    read_share(record, "the parts of a state that ranks exchange").entries if record else {}
                )
                for name in found.keys() & arrived.keys():
                    into, key = wanted[name]
                    arrived[name].append(_kept(found[name], into[key]))
        return [name for name, parts in arrived.items() if not _put(parts, *wanted[name])]

    def _fill(self, name: str, into: dict[str, Any], key: str) -> bool:
        """Fill an entry from this rank's shares; return whether it is complete."""
        wanted = into[key]
        having = [share for share in self._shares if name in share.entries]
        if not isinstance(wanted, PartedTensor):
            into[key] = having[0].take(name) if having else wanted
            return bool(having)
        is_there = bool(having) and _put([share.entries[name] for share in having], into, key)
        for share in having if is_there else ():
            if any(_overlaps(first, run, wanted.runs.wanted) for first, run in share.entries[name].values):
                share.take(name)
        return is_there

    def _batches(self, share: Held, names: Sequence[str]) -> Iterator[Held]:
        """Yield parts of some entries that a share writes, each within the limit of bytes."""
        batch: dict[str, Any] = {}
        size = 0
        for name in names:
            for piece in _pieces(share.entries[name], self._most_bytes) if name in share.entries else ():
                if isinstance(piece, Runs):
                    more = sum(run.nbytes for _, run in piece.values)
                else:
                    more = len(piece) if isinstance(piece, bytes) else _SMALL_BYTES
                if batch and size + more > self._most_bytes:
                    yield dataclasses.replace(share, entries=batch)
                    batch, size = {}, 0
                if name in batch:
                    batch[name].values.extend(piece.values)
                    batch[name].written.extend(piece.written)
                else:
                    batch[name] = piece
                size += more
        if batch:
            yield dataclasses.replace(share, entries=batch)

    def _tell(self, value: Any) -> list[Any]:
        records = self._gather(zlib.compress(json.dumps(value).encode(), level=1))
        return [json.loads(zlib.decompress(record)) for record in records]


def in_order(parts: Iterable[Sequence[tuple[int, Tensor]]]) -> list[tuple[int, Tensor]]:
    """Return the runs of several parts of a tensor in order. `Runs.run` requires that no run contains another."""
    found: list[tuple[int, Tensor]] = []
    for first, run in sorted(chain.from_iterable(parts), key=lambda one: (one[0], -one[1].numel())):
        if not found or first + run.numel() > found[-1][0] + found[-1][1].numel():
            found.append((first, run))
    return found


def models(entries: Mapping[str, T]) -> dict[str, T]:
    """Return the model's entries of a state, by their names in the model."""
    prefix = "model."
    return {name.removeprefix(prefix): one for name, one in entries.items() if name.startswith(prefix)}


def differences(saved: Kinds, model: Kinds) -> list[str]:
    """Describe the differences between a saved model's entries and this model's entries."""
    found = [
        *(f"{name!r} is missing in the checkpoint" for name in model.keys() - saved.keys()),
        *(f"{name!r} is not in the model" for name in saved.keys() - model.keys()),
        *(
            f"{name!r} is {saved[name] or 'no tensor'} in the checkpoint, {model[name] or 'no tensor'} in the model"
            for name in model.keys() & saved.keys()
            if saved[name] != model[name]
        ),
    ]
    return sorted(found)


def check_model(saved: Kinds, model: Kinds) -> None:
    """Raise unless a saved model has the entries of this one.

    Raises:
        ForeignCheckpoint: They differ; the message names the differences.
    """
    if found := differences(saved, model):
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise ForeignCheckpoint(
            f"the checkpoint is of another model: {'; '.join(found[:5])}{more}: expected the model that was "
            "saved, or load(..., partly=True) to take what fits"
        )


def _pieces(entry: Any, most_bytes: int) -> Iterator[Any]:
    """Yield a rank's part of an entry in pieces of at most so many bytes, or of one element; a value is not cut."""
    if not isinstance(entry, Runs):
        yield entry
        return
    most = max(1, most_bytes // entry.dtype.itemsize)
    for start, run in entry.own.values:
        for begin in range(0, max(1, run.numel()), most):
            piece = run[begin : begin + most]
            place = start + begin
            yield Runs(entry.shape, entry.dtype, [(place, piece)], [(place, place + piece.numel())])


def _put(parts: Sequence[Any], into: dict[str, Any], key: str) -> bool:
    """Fill an entry from parts that ranks wrote; return whether it is complete. The first of several values counts."""
    wanted = into[key]
    if not isinstance(wanted, PartedTensor):
        into[key] = next((one for one in parts if not isinstance(one, Runs)), wanted)
        return any(not isinstance(one, Runs) for one in parts)
    runs = wanted.runs
    alike = [
        one for one in parts if isinstance(one, Runs) and (one.shape, one.dtype) == (runs.shape, runs.dtype)
    ]
    # One part has all of it, or several do, of which each has another.
    return any(runs.fill(one.values) for one in alike) or runs.fill(in_order(one.own.values for one in alike))


def _kept(piece: Any, wanted: Any) -> Any:
    """Return a copy of the part of an arrived piece that this rank wants."""
    if not isinstance(piece, Runs) or not isinstance(wanted, PartedTensor):
        return piece
    values = [
        (start, run[start - first : stop - first].clone())
        for first, run in piece.values
        for start, stop in _overlaps(first, run, wanted.runs.wanted)
    ]
    ranges = [(start, start + run.numel()) for start, run in values]
    return Runs(piece.shape, piece.dtype, values, ranges)


def _overlaps(first: int, run: Tensor, wanted: Sequence[Range]) -> list[Range]:
    """Return the parts of some ranges, in order, that a run covers."""
    last, found = first + run.numel(), []
    for start, stop in wanted[max(0, bisect_right(wanted, first, key=lambda one: one[0]) - 1) :]:
        if start >= last:
            break
        if max(start, first) < min(stop, last):
            found.append((max(start, first), min(stop, last)))
    return found
