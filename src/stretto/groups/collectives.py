"""The table of collectives, and of the methods by which PyTorch calls them.

PyTorch calls a method of the process group for each collective, as in `group.broadcast([tensor], options)`. A group
written in Python needs all these methods. They differ in the order of their arguments, and PyTorch still calls some of
them by an older name. This file lists them once: an `Operation` is a collective with its number of bytes; a row of
`METHODS` is one method by which PyTorch calls it; a `Call` is one rank's call.

Bytes follow the algorithms that Gloo runs. N is the world size. Only payload counts, no headers; divisions round down.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch import Tensor

from stretto.groups.scattering import scatter_of

Pattern = Literal["ring", "direct"]
"""Which ranks send to which: each to the next one, or each to all others."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """A collective."""

    name: str
    """Name in counts, messages and traces."""
    pattern: Pattern
    sent_bytes: Callable[["Call"], int]
    """Bytes that the calling rank sends."""
    reduces: bool = False
    """Whether the ranks' tensors are reduced, by `Call.reduction`."""
    has_root: bool = False
    """Whether one rank, `Call.root`, has a different part."""
    sized_by: Literal["inputs", "outputs"] = "inputs"
    """The tensors that have the same sizes on all ranks. In a scatter, only the root has inputs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Method:
    """One method of a process group: a row of the table."""

    name: str
    operation: Operation
    arguments: tuple[str, ...]
    """Arguments before the options: `tensors` that are changed in place, or `outputs` and `inputs`, and the rows of
    an all-to-all."""
    aliases: tuple[str, ...] = ()
    """Older names, which PyTorch still calls."""
    is_listed: bool = False
    """Whether the parts of different ranks are a list of tensors; otherwise they are parts of one tensor."""
    single: str = ""
    """The argument that must be one tensor, although PyTorch passes it in a list."""

    @property
    def is_in_place(self) -> bool:
        """Whether outputs are written over the inputs."""
        return "tensors" in self.arguments


class Call(NamedTuple):
    """One rank's call of a collective."""

    method: Method
    arguments: tuple[Any, ...]
    """The arguments from PyTorch: those in `Method.arguments`, then options."""
    named: Mapping[str, Any]
    rank: int
    world_size: int
    inputs: list[Tensor]
    """The tensors to read, in one flat list; for a collective in place, the tensors to write."""
    outputs: list[Tensor]
    """The tensors to write, in one flat list."""
    output_splits: Sequence[int] = ()
    """Rows that come from each rank; empty for equal parts."""
    input_splits: Sequence[int] = ()
    """Rows that go to each rank; empty for equal parts."""

    def on(self, group: dist.ProcessGroup) -> dist.Work:
        """Make the same call on another group."""
        work: dist.Work = method_of(group, self.method.name)(*self.arguments, **self.named)
        return work

    @property
    def operation(self) -> Operation:
        return self.method.operation

    @property
    def has_splits(self) -> bool:
        """Whether the ranks' parts may have different numbers of rows."""
        return bool(self.input_splits or self.output_splits)

    @property
    def root(self) -> int:
        """The root rank: a field of torch's options, or an argument of the short forms."""
        first = self._options[0] if self._options else 0
        return first if isinstance(first, int) else int(first.rootRank)

    @property
    def reduction(self) -> Any:
        """The reduction: a field of torch's options, or an argument of the short forms."""
        chosen = [option for option in self._options if not isinstance(option, int)]  # an int is the root
        return getattr(chosen[0], "reduceOp", chosen[0]) if chosen else dist.ReduceOp.SUM

    @property
    def sized(self) -> list[Tensor]:
        """The tensors that have the same sizes on all ranks."""
        return self.outputs if self.operation.sized_by == "outputs" else self.inputs

    @property
    def own_bytes(self) -> int:
        """Bytes of `sized`."""
        return sum([tensor.nbytes for tensor in self.sized])

    @property
    def part_bytes(self) -> list[int]:
        """Return the bytes of an all-to-all for each rank."""
        if self.method.is_listed:
            return [tensor.nbytes for tensor in self.inputs]
        (whole,) = self.inputs
        row_bytes = whole.nbytes // max(1, whole.shape[0])
        equal_parts = [whole.nbytes // self.world_size] * self.world_size
        return [rows * row_bytes for rows in self.input_splits] or equal_parts

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank sends."""
        return self.operation.sent_bytes(self)

    @property
    def _options(self) -> list[Any]:
        """Return the arguments after the tensors and splits, except for a timeout."""
        given = [*self.arguments[len(self.method.arguments) :], *self.named.values()]
        return [option for option in given if not isinstance(option, timedelta)]


# Bytes that one rank sends


def all_reduce(size: int, world_size: int) -> int:
    """Return the bytes of a ring over a vector of `size` bytes: reduce-scatter, then all-gather, 2 (N-1)/N of it."""
    return 2 * (world_size - 1) * size // world_size


def reduce_scatter(size: int, world_size: int) -> int:
    """Return the bytes for `size` input bytes. Gloo all-reduces the whole input and keeps one part: 2 (N-1)/N of it."""
    return all_reduce(size, world_size)


def all_gather(own: int, world_size: int) -> int:
    """Return the bytes of a ring that passes on `own` bytes of every rank except the next: N-1 times `own`."""
    return (world_size - 1) * own


def all_to_all(parts: Sequence[int], rank: int) -> int:
    """Return the sum of `parts[r]` bytes over every other rank r."""
    return sum(parts) - parts[rank]


def broadcast(size: int, rank: int, root: int, world_size: int) -> int:
    """Return the bytes of a binomial tree: in round i the ranks at a distance below 2^i from the root send `size`
    bytes 2^i further.
    """
    distance = (rank - root) % world_size
    rounds = range((world_size - 1).bit_length())
    return size * sum(distance < 1 << i and distance + (1 << i) < world_size for i in rounds)


def reduce(size: int, rank: int, root: int, world_size: int) -> int:
    """Return the bytes of a ring reduce-scatter, (N-1)/N of `size`, after which every rank sends its 1/N to the
    root.
    """
    return (world_size - 1) * size // world_size + (0 if rank == root else size // world_size)


def gather(own: int, rank: int, root: int) -> int:
    """Return the `own` bytes that each rank sends to the root."""
    return 0 if rank == root else own


def scatter(part: int, rank: int, root: int, world_size: int) -> int:
    """Return the bytes that the root sends: `part` bytes to every other rank."""
    return (world_size - 1) * part if rank == root else 0


# The table

_ALL_REDUCE = Operation(
    "all_reduce", "ring", lambda call: all_reduce(call.own_bytes, call.world_size), reduces=True
)
_REDUCE = Operation(
    "reduce",
    "ring",
    lambda call: reduce(call.own_bytes, call.rank, call.root, call.world_size),
    reduces=True,
    has_root=True,
)
_BROADCAST = Operation(
    "broadcast",
    "direct",
    lambda call: broadcast(call.own_bytes, call.rank, call.root, call.world_size),
    has_root=True,
)
_ALL_GATHER = Operation("all_gather", "ring", lambda call: all_gather(call.own_bytes, call.world_size))
_REDUCE_SCATTER = Operation(
    "reduce_scatter", "ring", lambda call: reduce_scatter(call.own_bytes, call.world_size), reduces=True
)
_ALL_TO_ALL = Operation("all_to_all", "direct", lambda call: all_to_all(call.part_bytes, call.rank))
_GATHER = Operation(
    "gather", "direct", lambda call: gather(call.own_bytes, call.rank, call.root), has_root=True
)
_SCATTER = Operation(
    "scatter",
    "direct",
    lambda call: scatter(call.own_bytes, call.rank, call.root, call.world_size),
    has_root=True,
    sized_by="outputs",
)
_BARRIER = Operation("barrier", "direct", lambda call: 0)

_IN_PLACE = ("tensors",)
_ACROSS = ("outputs", "inputs")
_BY_ROWS = ("outputs", "inputs", "output_splits", "input_splits")

METHODS = (
    Method("allreduce", _ALL_REDUCE, _IN_PLACE),
    Method("allreduce_coalesced", _ALL_REDUCE, _IN_PLACE),
    Method("reduce", _REDUCE, _IN_PLACE),
    Method("broadcast", _BROADCAST, _IN_PLACE),
    Method("allgather", _ALL_GATHER, _ACROSS, is_listed=True, single="inputs"),
    Method("allgather_coalesced", _ALL_GATHER, _ACROSS, is_listed=True),
    Method("all_gather_single", _ALL_GATHER, _ACROSS, aliases=("_allgather_base",)),
    Method("all_gather_single_coalesced", _ALL_GATHER, _ACROSS, aliases=("allgather_into_tensor_coalesced",)),
    Method("reduce_scatter", _REDUCE_SCATTER, _ACROSS, is_listed=True, single="outputs"),
    Method("reduce_scatter_single", _REDUCE_SCATTER, _ACROSS, aliases=("_reduce_scatter_base",)),
    Method(
        "reduce_scatter_single_coalesced",
        _REDUCE_SCATTER,
        _ACROSS,
        aliases=("reduce_scatter_tensor_coalesced",),
    ),
    Method("alltoall", _ALL_TO_ALL, _ACROSS, is_listed=True),
    Method("all_to_all_single", _ALL_TO_ALL, _BY_ROWS, aliases=("alltoall_base",)),
    Method("gather", _GATHER, _ACROSS, is_listed=True, single="inputs"),
    Method("scatter", _SCATTER, _ACROSS, is_listed=True, single="outputs"),
    Method("barrier", _BARRIER, ()),
)
"""Every collective of `torch.distributed.ProcessGroup`."""

_OLDER = {method.name: method.aliases[0] for method in METHODS if method.aliases}
"""Older names of some methods, before PyTorch 2.13."""


def method_of(group: dist.ProcessGroup, name: str) -> Callable[..., dist.Work]:
    """Return the method that PyTorch 2.13 calls `name`, also in older versions."""
    if name == "reduce_scatter_single" and (scatter := scatter_of(group)) is not None:
        return scatter
    method: Callable[..., dist.Work] = getattr(group, name if hasattr(group, name) else _OLDER[name])
    return method
