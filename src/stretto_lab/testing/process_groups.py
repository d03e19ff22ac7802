"""The kit for process groups: what the library asks of any group, on any number of ranks."""

import contextlib
import functools
import itertools
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch import distributed as dist

from stretto.errors import ConformanceFailed
from stretto.exchange.scratch import IN_FLIGHT
from stretto.groups.collectives import method_of
from stretto.groups.private import private_group, release
from stretto.strategies import ZeRO1
from stretto_lab.testing.collectives import (
    ALL_GATHER,
    ALL_GATHER_LIST,
    ALL_REDUCE,
    ALL_TO_ALL,
    ALL_TO_ALL_UNEVEN,
    BROADCAST,
    EVERY,
    REDUCE_SCATTER,
    Call,
    Collective,
)
from stretto_lab.testing.conformance import Conformance, Program, difference, expect, expect_nothing_on_ranks
from stretto_lab.testing.tracer import Plan, Traced, trace

_SOON = timedelta(milliseconds=10)
"""How long to wait for a collective that cannot complete."""


EVERY_NAME = tuple(collective.name for collective in EVERY)
"""Names of the collectives that are checked."""


class ProcessGroupConformance(Conformance):
    """Checks a `torch.distributed.ProcessGroup` that the library, or stock PyTorch, is to run on.

        class TestMyGroup(ProcessGroupConformance):
            def run_ranks(self, world_size, program):
                return my_launcher(world_size, program)     # calls program(rank, my_group) on every rank

    The collectives are those that the exchanges issue and those that stock DDP adds. Values are integers that every
    order of addition sums exactly in their dtype, and in none narrower, so results are compared to the bit.
    """

    world_sizes: ClassVar[Sequence[int]] = (1, 2, 3)
    """On how many ranks each check runs."""
    summed: ClassVar[Sequence[torch.dtype]] = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
    """Dtypes that reductions must add: the wire formats, and what users' metrics and stock DDP add."""
    moved: ClassVar[Sequence[torch.dtype]] = (torch.float32, torch.bfloat16, torch.uint8, torch.int64)
    """Dtypes that the other collectives must move: the wire formats, records as bytes, indices."""
    sizes: ClassVar[Sequence[int]] = (1, 7, 4099)
    """Elements per rank, or per part; odd ones, because nothing may rely on padding."""
    untimed: ClassVar[Collection[str]] = ()
    """Names of collectives whose `wait(timeout)` does not raise when the time is up, so that a job does not look around
    in them. Of Gloo itself, jobs avoid the reduce-scatter, which is one. On a virtual cluster, whose time stands still,
    all are (`EVERY_NAME`)."""
    refuses_mismatches: ClassVar[bool] = False
    """Whether the group claims to refuse collectives in which ranks disagree; most do not, and hang or mix."""

    def run_ranks(self, world_size: int, program: Program) -> Sequence[Any]:
        """Run `program(rank, group)` on `world_size` ranks, each handed its group, and return the results in order.

        Every call makes new groups: what an earlier program left behind must not matter.
        """
        raise NotImplementedError("a kit for process groups needs run_ranks(world_size, program)")

    def test_ranks_are_numbered_and_counted(self) -> None:
        """`rank()` counts from 0 in the order of the ranks, `size()` is their number, and the backend has a name."""
        for world_size in self.world_sizes:
            found = self.run_ranks(world_size, _name_yourself)
            expect(
                f"(rank, size, has a backend name) by rank on {world_size} ranks",
                [(rank, world_size, True) for rank in range(world_size)],
                list(found),
            )

    def test_all_reduce_gives_every_rank_the_sum(self) -> None:
        """`allreduce([tensor])`, in the tensor's own dtype."""
        self._check_results(ALL_REDUCE)

    def test_reduce_scatter_gives_every_rank_its_part_of_the_sum(self) -> None:
        """`reduce_scatter_single(output, input, options)`."""
        self._check_results(REDUCE_SCATTER)

    def test_all_gather_gives_every_rank_all_tensors_in_rank_order(self) -> None:
        """`all_gather_single(output, input)`, and `allgather([outputs], [input])` as stock DDP calls it."""
        self._check_results(ALL_GATHER, ALL_GATHER_LIST)

    def test_all_to_all_gives_every_rank_the_parts_meant_for_it(self) -> None:
        """`alltoall_base(output, input, output_splits, input_splits)`; no splits are equal ones."""
        self._check_results(ALL_TO_ALL, ALL_TO_ALL_UNEVEN)

    def test_broadcast_gives_every_rank_the_roots_values(self) -> None:
        """`broadcast([tensor], options)` from the last rank."""
        self._check_results(BROADCAST)

    def test_gathered_bits_are_not_touched(self) -> None:
        """NaN keeps its payload and zero its sign: parameters must come back as they were sent."""
        self._check_on_every_world(_gather_odd_bits)

    def test_several_in_flight_get_each_its_own_result(self) -> None:
        """More collectives than the exchanges keep in flight, of all kinds, waited for in order and in reverse."""
        self._check_on_every_world(_keep_in_flight)

    def test_a_collective_is_not_complete_before_every_rank_has_entered(self) -> None:
        """Neither `is_completed` nor `wait` may say so, and a `wait` that timed out may be repeated."""
        late = functools.partial(_let_one_rank_be_late, frozenset(self.untimed))
        for world_size in self.world_sizes:
            if world_size > 1:
                expect_nothing_on_ranks(self.run_ranks(world_size, late))

    def test_a_private_group_does_not_mix_its_traffic_with_its_siblings(self) -> None:
        """The library trains on `private_group(group)` while the user's own collectives are under way."""
        self._check_on_every_world(_use_two_groups)

    def test_a_group_outlives_many_private_ones(self) -> None:
        """Made, used and released one after the other, as jobs of one process are."""
        self._check_on_every_world(_make_and_release)

    def test_a_job_trains_on_it(self) -> None:
        """Two updates of a synchronous strategy, in which every micro-batch of every rank is applied once."""
        plan = Plan(strategy=ZeRO1(), micro_batches=2, updates=2)
        for world_size in self.world_sizes:
            traces = self.run_ranks(world_size, functools.partial(trace, plan))
            what = f"micro-batches not applied once on {world_size} ranks: (rank, index, expected, found)"
            expect(what, [], Traced(plan, traces).times_applied())

    def test_disagreeing_ranks_are_refused(self) -> None:
        """Every rank hears of it, where the group claims to notice at all; see `refuses_mismatches`."""
        if not self.refuses_mismatches:
            return
        world_sizes = [world_size for world_size in self.world_sizes if world_size > 1]
        for world_size, kind in itertools.product(world_sizes, _MISMATCHES):
            try:
                refused = self.run_ranks(world_size, functools.partial(_disagree, kind))
            except Exception:  # a launcher may pass the refusal on
                continue
            accepted = [rank for rank, refusal in enumerate(refused) if not refusal]
            if accepted:
                raise ConformanceFailed(
                    f"ranks that disagree in {kind}, on {world_size} ranks: expected an error on every rank, "
                    f"found none on ranks {accepted}"
                )

    def _check_results(self, *collectives: Collective) -> None:
        dtypes = {collective: self.summed if collective.adds else self.moved for collective in collectives}
        calls = [
            Call(collective, dtype, numel, number)
            for collective in collectives
            for number, (dtype, numel) in enumerate(itertools.product(dtypes[collective], self.sizes))
        ]
        self._check_on_every_world(functools.partial(_compare_results, calls))

    def _check_on_every_world(self, program: Program) -> None:
        for world_size in self.world_sizes:
            expect_nothing_on_ranks(self.run_ranks(world_size, program))


def _name_yourself(rank: int, group: dist.ProcessGroup) -> tuple[int, int, bool]:
    return group.rank(), group.size(), bool(group.name())


def _compare_results(calls: Sequence[Call], rank: int, group: dist.ProcessGroup) -> list[str]:
    """Perform one call after the other; return what differs from what it should give."""
    findings = []
    for call in calls:
        own = call.input(rank, group.size())
        work, result = call.collective.start(group, own)
        work.wait()
        findings += difference(str(call), call.expected(rank, group.size()), result)
        if not call.collective.adds and own is not result:
            findings += difference(f"the input of {call}", call.input(rank, group.size()), own)
    return findings


def _gather_odd_bits(rank: int, group: dist.ProcessGroup) -> list[str]:
    patterns = torch.tensor([0x7FC00001, 0x7F800001, -0x80000000, 0x00000001, 0x7F800000], dtype=torch.int32)
    odd = (patterns + rank % 2).view(torch.float32)
    whole = torch.empty(odd.numel() * group.size())
    method_of(group, "all_gather_single")(whole, odd).wait()
    expected = torch.cat([(patterns + other % 2).view(torch.float32) for other in range(group.size())])
    return difference("all_gather_single of NaN, signed zero, subnormal and infinity", expected, whole)


def _keep_in_flight(rank: int, group: dist.ProcessGroup) -> list[str]:
    findings = []
    for reverse in (False, True):
        calls = [Call(EVERY[i % len(EVERY)], torch.float32, 500 - 60 * i, i) for i in range(2 * IN_FLIGHT)]
        started = [call.collective.start(group, call.input(rank, group.size())) for call in calls]
        order = list(zip(calls, started, strict=True))
        for call, (work, result) in reversed(order) if reverse else order:
            work.wait()
            what = f"{call}, number {call.number} of {len(calls)} in flight"
            findings += difference(what, call.expected(rank, group.size()), result)
    return findings


def _let_one_rank_be_late(untimed: Collection[str], rank: int, group: dist.ProcessGroup) -> list[str]:
    """The last rank, which is the broadcast's root, enters only after the others have looked at their works."""
    size = group.size()
    signals = private_group(group)
    findings = []
    for number, collective in enumerate(EVERY):
        call = Call(collective, torch.float32, 16, number)
        own = call.input(rank, size)
        if rank == size - 1:
            _meet(signals)
            work, result = collective.start(group, own)
        else:
            work, result = collective.start(group, own)
            findings += _complain_if_complete(work, call, call.collective.name not in untimed)
            _meet(signals)
        work.wait()
        findings += difference(f"{call} after waiting in vain", call.expected(rank, size), result)
    release(signals)
    return findings


def _complain_if_complete(work: dist.Work, call: Call, times_out: bool) -> list[str]:
    if times_out:
        with contextlib.suppress(RuntimeError):  # what it should do, unless it is complete
            work.wait(_SOON)
            return [
                f"{call}: expected wait({_SOON}) to raise while a rank has not entered, found that it returned"
            ]
    if not work.is_completed():
        return []
    return [f"{call}: expected an incomplete work while a rank has not entered it, found a complete one"]


def _meet(group: dist.ProcessGroup) -> None:
    """Return once every rank is here."""
    group.allreduce([torch.zeros(1)]).wait()


def _use_two_groups(rank: int, group: dist.ProcessGroup) -> list[str]:
    """Collectives under way together on two groups, which ranks start and wait for in opposite orders."""
    siblings = {"the group": group, "its private sibling": private_group(group)}
    findings = []
    for number in range(3):
        call = Call(ALL_REDUCE, torch.float32, 1000, number)
        other = Call(ALL_REDUCE, torch.float32, 1000, 100 + number)
        under_way = [(name, call if name == "the group" else other) for name in siblings]
        if rank % 2:
            under_way.reverse()
        started = [
            (name, call, call.collective.start(siblings[name], call.input(rank, group.size())))
            for name, call in under_way
        ]
        for name, call, (work, result) in reversed(started):
            work.wait()
            expected = call.expected(rank, group.size())
            findings += difference(f"{call} on {name} with another under way", expected, result)
    release(siblings["its private sibling"])
    return findings


def _make_and_release(rank: int, group: dist.ProcessGroup) -> list[str]:
    findings = []
    for number in range(3):
        sibling = private_group(group)
        if (found := (sibling.rank(), sibling.size())) != (expected := (group.rank(), group.size())):
            findings.append(f"private group {number}: expected (rank, size) {expected}, found {found}")
        call = Call(ALL_GATHER, torch.float32, 5, number)
        work, result = call.collective.start(sibling, call.input(rank, group.size()))
        work.wait()
        what = f"{call} on private group {number}"
        findings += difference(what, call.expected(rank, group.size()), result)
        release(sibling)
    return findings


_MISMATCHES = ("number of elements", "dtype", "root", "collective")


def _disagree(kind: str, rank: int, group: dist.ProcessGroup) -> str:
    """Let the last rank do something else than the others; return the error it met, or nothing."""
    odd = rank == group.size() - 1
    try:
        _start_disagreeing(kind, odd, group).wait()
    except Exception as error:  # its kind is the group's own affair
        return f"{type(error).__name__}: {error}"
    return ""


def _start_disagreeing(kind: str, odd: bool, group: dist.ProcessGroup) -> dist.Work:
    numel = 8 if odd and kind == "number of elements" else 4
    tensor: Tensor = torch.ones(numel, dtype=torch.float64 if odd and kind == "dtype" else torch.float32)
    if kind == "root":
        options = dist.BroadcastOptions()
        options.rootRank = 1 if odd else 0
        return group.broadcast([tensor], options)
    if odd and kind == "collective":
        return method_of(group, "all_gather_single")(tensor.new_empty(numel * group.size()), tensor)
    return group.allreduce([tensor])
