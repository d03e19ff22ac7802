"""What each collective should give, on values that every order of addition sums exactly."""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch import distributed as dist

from stretto.groups.collectives import method_of

Started = tuple[dist.Work, Tensor]
"""A collective under way, and the tensor that holds this rank's result once it is complete."""

_EXACT_BITS = {
    torch.float64: 53,
    torch.float32: 24,
    torch.float16: 11,
    torch.bfloat16: 8,
    torch.int64: 62,
    torch.int32: 31,
    torch.uint8: 8,
}
"""Integers below 2 to this power are exact in the dtype."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Collective:
    """One collective: how to start it, and what it should give."""

    name: str
    start: Callable[[dist.ProcessGroup, Tensor], Started]
    """Starts it on this rank's input."""
    expected: Callable[[int, Sequence[Tensor]], Tensor]
    """Returns this rank's result from its rank and the inputs of all ranks."""
    adds: bool = False
    parts: bool = False
    """Whether the input holds one equal part for every rank."""

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Call:
    """One use of a collective; equal on all ranks."""

    collective: Collective
    dtype: torch.dtype
    numel: int
    """Elements of the input, or of each of its parts."""
    number: int
    """Tells calls apart: each has values of its own."""

    def input(self, rank: int, world_size: int) -> Tensor:
        """Return a rank's input: odd and even integers as large as their sum over ranks can be exact."""
        numel = self.numel * (world_size if self.collective.parts else 1)
        limit = 2 ** _EXACT_BITS[self.dtype] // world_size - 1
        generator = torch.Generator().manual_seed(1000 * self.number + rank)
        low = -limit if self.dtype.is_signed else 0
        return torch.randint(low, limit + 1, (numel,), generator=generator).to(self.dtype)

    def expected(self, rank: int, world_size: int) -> Tensor:
        """Return a rank's result."""
        inputs = [self.input(other, world_size) for other in range(world_size)]
        return self.collective.expected(rank, inputs)

    def __repr__(self) -> str:
        return f"{self.collective} of {self.numel} x {self.dtype}"


def _all_reduce(group: dist.ProcessGroup, own: Tensor) -> Started:
    return group.allreduce([own]), own


def _broadcast(group: dist.ProcessGroup, own: Tensor) -> Started:
    options = dist.BroadcastOptions()
    options.rootRank = group.size() - 1
    return group.broadcast([own], options), own


def _all_gather(group: dist.ProcessGroup, own: Tensor) -> Started:
    whole = own.new_empty(own.numel() * group.size())
    return method_of(group, "all_gather_single")(whole, own), whole


def _all_gather_list(group: dist.ProcessGroup, own: Tensor) -> Started:
    whole = own.new_empty(own.numel() * group.size())
    return group.allgather([list(whole.chunk(group.size()))], [own]), whole


def _reduce_scatter(group: dist.ProcessGroup, own: Tensor) -> Started:
    part = own.new_empty(own.numel() // group.size())
    return method_of(group, "reduce_scatter_single")(part, own, dist.ReduceScatterOptions()), part


def _all_to_all(group: dist.ProcessGroup, own: Tensor) -> Started:
    received = torch.empty_like(own)
    return method_of(group, "all_to_all_single")(received, own, [], []), received


def _all_to_all_uneven(group: dist.ProcessGroup, own: Tensor) -> Started:
    """Rank r receives everything from itself and nothing from others, but for one element to and from each."""
    ones = [1] * group.size()
    ones[group.rank()] = own.numel() - (group.size() - 1)
    received = torch.empty_like(own)
    return method_of(group, "all_to_all_single")(received, own, ones, ones), received


def _uneven_result(rank: int, inputs: Sequence[Tensor]) -> Tensor:
    result = inputs[rank].clone()
    size = len(inputs)
    for other in range(size):
        if other != rank:
            # One element each stands before the sender's own block, or behind it.
            sent = rank if rank < other else inputs[other].numel() - size + rank
            place = other if other < rank else result.numel() - size + other
            result[place] = inputs[other][sent]
    return result


def _sum(rank: int, inputs: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(inputs)).sum(0, dtype=inputs[0].dtype)


def _own_part_of_sum(rank: int, inputs: Sequence[Tensor]) -> Tensor:
    return _sum(rank, inputs).chunk(len(inputs))[rank]


def _parts_for(rank: int, inputs: Sequence[Tensor]) -> Tensor:
    return torch.cat([whole.chunk(len(inputs))[rank] for whole in inputs])


def _everything(rank: int, inputs: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(inputs))


def _last(rank: int, inputs: Sequence[Tensor]) -> Tensor:
    return inputs[-1]


ALL_REDUCE = Collective(name="allreduce", start=_all_reduce, expected=_sum, adds=True)
REDUCE_SCATTER = Collective(
    name="reduce_scatter_single", start=_reduce_scatter, expected=_own_part_of_sum, adds=True, parts=True
)
ALL_GATHER = Collective(name="all_gather_single", start=_all_gather, expected=_everything)
ALL_GATHER_LIST = Collective(name="allgather", start=_all_gather_list, expected=_everything)
ALL_TO_ALL = Collective(name="alltoall_base", start=_all_to_all, expected=_parts_for, parts=True)
ALL_TO_ALL_UNEVEN = Collective(
    name="alltoall_base with splits", start=_all_to_all_uneven, expected=_uneven_result, parts=True
)
BROADCAST = Collective(name="broadcast", start=_broadcast, expected=_last)
EVERY = (
    ALL_REDUCE,
    REDUCE_SCATTER,
    ALL_GATHER,
    ALL_GATHER_LIST,
    ALL_TO_ALL,
    ALL_TO_ALL_UNEVEN,
    BROADCAST,
)
