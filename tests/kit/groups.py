"""The laws of a process group: each collective gives what it should, to the bit, alone and beside others.

Values are integers that every order of addition sums exactly in their dtype, and in none narrower.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from stretto.exchange.scratch import IN_FLIGHT
from stretto.groups.collectives import method_of
from stretto.groups.private import private_group, release
from stretto.strategies import ZeRO1
from stretto_lab.testing import Job, differing, on_virtual_ranks, train

_SOON = timedelta(milliseconds=10)
"""How long to wait for a collective that cannot complete."""
_EXACT_BITS = {torch.float64: 53, torch.float32: 24, torch.bfloat16: 8, torch.int64: 62, torch.uint8: 8}
"""Integers below 2 to this power are exact in the dtype."""
Started = tuple[dist.Work, Tensor]
"""A collective under way, and the tensor that holds this rank's result once it is complete."""


def _root(rank: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = rank
    return options


def _gather(group: dist.ProcessGroup, own: Tensor, as_list: bool = False) -> Started:
    whole = own.new_empty(own.numel() * group.size())
    if as_list:
        return group.allgather([list(whole.chunk(group.size()))], [own]), whole
    return method_of(group, "all_gather_single")(whole, own), whole


def _scatter(group: dist.ProcessGroup, own: Tensor) -> Started:
    part = own.new_empty(own.numel() // group.size())
    return method_of(group, "reduce_scatter_single")(part, own, dist.ReduceScatterOptions()), part


def _deal(group: dist.ProcessGroup, own: Tensor, uneven: bool = False) -> Started:
    """Uneven: rank r receives everything from itself and one element from each of the others."""
    ones, received = [1] * group.size(), torch.empty_like(own)
    ones[group.rank()] = own.numel() - (group.size() - 1)
    splits = ones if uneven else []
    return method_of(group, "all_to_all_single")(received, own, splits, splits), received


def _uneven_result(rank: int, inputs: Sequence[Tensor]) -> Tensor:
    result, size = inputs[rank].clone(), len(inputs)
    for other in range(size):
        if other != rank:
            # One element each stands before the sender's own block, or behind it.
            sent = rank if rank < other else inputs[other].numel() - size + rank
            result[other if other < rank else result.numel() - size + other] = inputs[other][sent]
    return result


def _sum(rank: int, inputs: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(inputs)).sum(0, dtype=inputs[0].dtype)


EVERY: dict[str, tuple[Callable[..., Started], Callable[[int, Sequence[Tensor]], Tensor]]] = {
    "allreduce": (lambda group, own: (group.allreduce([own]), own), _sum),
    "reduce_scatter_single": (_scatter, lambda rank, all: _sum(rank, all).chunk(len(all))[rank]),
    "all_gather_single": (_gather, lambda rank, all: torch.cat(list(all))),
    "allgather": (functools.partial(_gather, as_list=True), lambda rank, all: torch.cat(list(all))),
    "alltoall_base": (_deal, lambda rank, all: torch.cat([one.chunk(len(all))[rank] for one in all])),
    "alltoall_base with splits": (functools.partial(_deal, uneven=True), _uneven_result),
    "broadcast": (
        lambda group, own: (group.broadcast([own], _root(group.size() - 1)), own),
        lambda rank, all: all[-1],
    ),
}
"""Starts a collective on a rank's input, the last rank the root; and gives a rank's result from the inputs of all."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One use of a collective; equal on all ranks."""

    name: str
    dtype: torch.dtype
    numel: int
    """Elements of the input, or of each of its parts."""
    number: int = 0
    """Tells calls apart: each has values of its own."""

    def input(self, rank: int, size: int) -> Tensor:
        numel = self.numel * (size if self.name.startswith(("reduce_scatter", "alltoall")) else 1)
        limit = 2 ** _EXACT_BITS[self.dtype] // size - 1
        generator = torch.Generator().manual_seed(1000 * self.number + rank)
        low = -limit if self.dtype.is_signed else 0
        return torch.randint(low, limit + 1, (numel,), generator=generator).to(self.dtype)

    def start(self, group: dist.ProcessGroup) -> tuple[dist.Work, Tensor, Tensor]:
        """Return the work, the result and the input."""
        own = self.input(group.rank(), group.size())
        return *EVERY[self.name][0](group, own), own

    def faults(self, group: dist.ProcessGroup, result: Tensor, what: str = "") -> list[str]:
        inputs = [self.input(rank, group.size()) for rank in range(group.size())]
        expected = EVERY[self.name][1](group.rank(), inputs)
        return differing(expected, result, f"{self.name} of {self.numel} x {self.dtype}{what}")


def _results(rank: int, group: dist.ProcessGroup) -> list[str]:
    """Perform one call after the other, with each dtype and odd size: nothing may rely on padding."""
    broken = []
    summed = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
    moved = (torch.float32, torch.bfloat16, torch.uint8, torch.int64)
    for name in EVERY:
        adds = "reduce" in name
        for number, (dtype, numel) in enumerate(itertools.product(summed if adds else moved, (1, 7, 4099))):
            call = Call(name, dtype, numel, number)
            work, result, own = call.start(group)
            work.wait()
            broken += call.faults(group, result)
            if not adds and own is not result:
                broken += differing(call.input(rank, group.size()), own, f"the input of {call}")
    return broken


def _odd_bits(rank: int, group: dist.ProcessGroup) -> list[str]:
    """NaN keeps its payload and zero its sign: parameters must come back as they were sent."""
    patterns = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000, 1, 0x7F800000], dtype=torch.int32)
    odd = [(patterns + other % 2).view(torch.float32) for other in range(group.size())]
    work, whole = _gather(group, odd[rank])
    work.wait()
    return differing(torch.cat(odd), whole, "NaN, signed zero, subnormal and infinity")


def _in_flight(rank: int, group: dist.ProcessGroup) -> list[str]:
    """More than the exchanges keep in flight, of all kinds, waited for in order and in reverse."""
    broken, names = [], itertools.cycle(EVERY)
    for reverse in (False, True):
        calls = [Call(next(names), torch.float32, 500 - 60 * i, i) for i in range(2 * IN_FLIGHT)]
        order = [(call, *call.start(group)) for call in calls]
        for call, work, result, _ in reversed(order) if reverse else order:
            work.wait()
            broken += call.faults(group, result, ", in flight")
    return broken


def _late(untimed: Collection[str], rank: int, group: dist.ProcessGroup) -> list[str]:
    """The last rank, the broadcast's root, enters only after the others have looked at their works."""
    signals, broken = private_group(group), []
    for number, name in enumerate(EVERY):
        call = Call(name, torch.float32, 16, number)
        if rank == group.size() - 1:
            signals.allreduce([torch.zeros(1)]).wait()
        work, result, _ = call.start(group)
        if rank < group.size() - 1:
            if name not in untimed:
                with contextlib.suppress(RuntimeError):  # the wait should raise, unless the work is complete
                    work.wait(_SOON)
                    broken.append(f"{name}: expected wait({_SOON}) to raise while a rank has not entered")
            if work.is_completed():
                broken.append(f"{name}: expected an incomplete work while a rank has not entered it")
            signals.allreduce([torch.zeros(1)]).wait()
        work.wait()
        broken += call.faults(group, result, ", after waiting in vain")
    release(signals)
    return broken


def _siblings(rank: int, group: dist.ProcessGroup) -> list[str]:
    """Collectives under way together on two groups, which ranks start and wait for in opposite orders; many groups."""
    sibling, broken = private_group(group), []
    for number in range(3):
        calls = [(group, Call("allreduce", torch.float32, 1000, number))]
        calls.append((sibling, Call("allreduce", torch.float32, 1000, 100 + number)))
        if rank % 2:
            calls.reverse()
        for on, call, (work, result, _) in reversed([(on, call, call.start(on)) for on, call in calls]):
            work.wait()
            name = "the group" if on is group and call.number < 100 else "its private sibling"
            broken += call.faults(group, result, f" on {name} with another under way")
    release(sibling)
    for number in range(3):
        another = private_group(group)
        broken += differing((rank, group.size()), (another.rank(), another.size()), f"private group {number}")
        call = Call("all_gather_single", torch.float32, 5, number)
        work, result, _ = call.start(another)
        work.wait()
        broken += call.faults(group, result, f" on private group {number}")
        release(another)
    return broken


_JOB = Job(strategy=ZeRO1(), updates=2)


def _whole(untimed: Collection[str], rank: int, group: dist.ProcessGroup) -> list[str]:
    found = (group.rank(), group.size(), bool(group.name()))
    if found != (rank, group.size(), True):
        return [f"(rank, size, has a name): found {found} on rank {rank}"]
    late = functools.partial(_late, untimed)
    for law in (_results, _odd_bits, _in_flight, _siblings, *([late] if group.size() > 1 else [])):
        if broken := law(rank, group):
            return broken
    return []


_MISMATCHES = ("number of elements", "dtype", "root", "collective")


def _disagree(kind: str, rank: int, group: dist.ProcessGroup) -> bool:
    """Let the last rank do something else than the others; return whether it is refused."""
    odd = rank == group.size() - 1
    numel = 8 if odd and kind == "number of elements" else 4
    tensor = torch.ones(numel, dtype=torch.float64 if odd and kind == "dtype" else torch.float32)
    try:
        if kind == "root":
            group.broadcast([tensor], _root(int(odd))).wait()
        elif odd and kind == "collective":
            _gather(group, tensor)[0].wait()
        else:
            group.allreduce([tensor]).wait()
    except Exception:  # its kind is the group's own affair
        return True
    return False


def group_faults(
    run: Callable[..., Sequence[Any]],
    ranks: Sequence[int] = (1, 2, 3),
    *,
    untimed: Collection[str] = (),
    refuses_mismatches: bool = False,
) -> list[str]:
    """Return which laws a group breaks that `run(world_size, program)` hands to every rank, a new one each time.

    Args:
        run: Runs the ranks.
        ranks: Their numbers.
        untimed: Names of collectives whose `wait(timeout)` does not raise when the time is up.
        refuses_mismatches: Whether the group claims to refuse collectives in which ranks disagree.
    """
    broken = []
    for size in ranks:
        found = run(size, functools.partial(_whole, untimed))
        if not any(found):
            program = functools.partial(train, _JOB)
            pairs = zip(on_virtual_ranks(size, program), run(size, program), strict=True)
            found = [course.differs_from(expected, "a job") for expected, course in pairs]
        broken += [f"rank {rank} of {size}: {text}" for rank, texts in enumerate(found) for text in texts]
        for kind in _MISMATCHES if refuses_mismatches and size > 1 else ():
            try:
                refused = run(size, functools.partial(_disagree, kind))
            except Exception:  # a launcher may pass the refusal on
                continue
            if not all(refused):
                broken.append(f"{size} ranks that disagree in {kind}: expected an error on every rank")
    return broken
