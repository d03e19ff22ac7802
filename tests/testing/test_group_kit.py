"""The library's process groups pass the kit for groups, and each broken one fails the checks that it should."""

import functools
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist

from stretto.errors import ConformanceFailed
from stretto.groups.collective_group import SoloGroup
from stretto.groups.staged import StagedGroup
from stretto.groups.throttled import register_throttled
from stretto.link import Link
from stretto_lab.testing import ProcessGroupConformance
from stretto_lab.testing.conformance import Program
from stretto_lab.testing.process_groups import EVERY_NAME
from stretto_lab.virtual import NETWORKS, VirtualCluster
from tests.processes import run_program
from tests.testing.broken_groups import (
    CompletesEarly,
    CompletesOutOfOrder,
    CountsFromOne,
    MistakesTheRoot,
    QuietsNaN,
    SharesWithItsSiblings,
    Spoiled,
    SumsInSixteenBits,
    SwapsTwoRanksChunks,
)


class TestSoloGroup(ProcessGroupConformance):
    world_sizes = (1,)

    def run_ranks(self, world_size: int, program: Program) -> Sequence[Any]:
        return [program(0, SoloGroup())]


class TestGloo(ProcessGroupConformance):
    world_sizes = (3,)

    def run_ranks(self, world_size: int, program: Program) -> Sequence[Any]:
        return run_program(world_size, program)


class TestThrottledGroup(ProcessGroupConformance):
    world_sizes = (2,)

    def run_ranks(self, world_size: int, program: Program) -> Sequence[Any]:
        prepare = functools.partial(register_throttled, Link.parse("200mbit,100us"))
        return run_program(world_size, program, backend="throttled", prepare=prepare)


class TestStagedGroup(ProcessGroupConformance):
    """On a host every tensor is copied all the same."""

    world_sizes = (2,)

    def run_ranks(self, world_size: int, program: Program) -> Sequence[Any]:
        return run_program(world_size, functools.partial(staged, program))


def staged(program: Program, rank: int, group: dist.ProcessGroup) -> Any:
    return program(rank, StagedGroup(group))


class TestVirtualGroup(ProcessGroupConformance):
    world_sizes = (1, 2, 3, 8)
    untimed = EVERY_NAME
    refuses_mismatches = True

    def run_ranks(self, world_size: int, program: Program) -> Sequence[Any]:
        return VirtualCluster(world_size, network=NETWORKS["office"]).run(program).values


class TestSpoiledByNothing(ProcessGroupConformance):
    """What is spoiled below is sound before."""

    untimed = EVERY_NAME
    refuses_mismatches = True
    kind: type[Spoiled] = Spoiled

    def run_ranks(self, world_size: int, program: Program) -> Sequence[Any]:
        return VirtualCluster(world_size, faults=self.kind).run(program).values


BROKEN = [
    (CountsFromOne, "test_ranks_are_numbered", "on 1 ranks: expected [(0, 1, True)], found [(1, 1, True)]"),
    (SumsInSixteenBits, "test_all_reduce", "allreduce of 7 x torch.float32"),
    (SumsInSixteenBits, "test_reduce_scatter", "reduce_scatter_single of 7 x torch.float32"),
    (SwapsTwoRanksChunks, "test_all_to_all", "rank 0 of 2: alltoall_base of 1 x torch.float32: 2 of 2 elements"),
    (MistakesTheRoot, "test_broadcast", "rank 0 of 2: broadcast of 7 x torch.float32: 7 of 7 elements"),
    (MistakesTheRoot, "test_disagreeing_ranks", "disagree in root, on 2 ranks: expected an error on every rank"),
    (QuietsNaN, "test_gathered_bits", "expected nan, found nan"),
    (CompletesOutOfOrder, "test_several_in_flight", "in flight"),
    (CompletesEarly, "test_a_collective_is_not_complete", "of 16 x torch.float32: expected an incomplete work"),
    (SharesWithItsSiblings, "test_a_private_group", "on its private sibling with another under way"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "check", "message"), BROKEN, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_broken_group_fails_the_check_that_names_its_fault(
    kind: type[Spoiled], check: str, message: str
) -> None:
    kit = TestSpoiledByNothing()
    kit.kind = kind
    (name,) = (name for name in kit.checks() if name.startswith(check))
    with pytest.raises(ConformanceFailed, match=re.escape(message)):
        getattr(kit, name)()
