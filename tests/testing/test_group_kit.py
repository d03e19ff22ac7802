"""The library's process groups keep the laws of groups, and each broken one breaks the law that it should."""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.staged import StagedGroup
from stretto.groups.collective_group import SoloGroup
from stretto.groups.throttled import register_throttled
from stretto.link import Link
from stretto_lab.virtual import NETWORKS, VirtualCluster
from tests.kit.groups import EVERY, group_faults
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


def staged(program: Any, rank: int, group: dist.ProcessGroup) -> Any:
    """On a host every tensor is copied all the same."""
    return program(rank, StagedGroup(group))


def on_throttled(world_size: int, program: Any) -> list[Any]:
    prepare = functools.partial(register_throttled, Link.parse("200mbit,100us"))
    return run_program(world_size, program, backend="throttled", prepare=prepare)


def on_virtual(world_size: int, program: Any, **options: Any) -> Sequence[Any]:
    return VirtualCluster(world_size, **options).run(program).values


# Time stands still on a virtual cluster: no wait is over before it should be.
VIRTUAL = {"untimed": EVERY, "refuses_mismatches": True}


@pytest.mark.parametrize(
    ("run", "ranks", "claims"),
    [
        (lambda size, program: [program(0, SoloGroup())], (1,), {}),
        (run_program, (3,), {}),
        (on_throttled, (2,), {}),
        (lambda size, program: run_program(size, functools.partial(staged, program)), (2,), {}),
        (functools.partial(on_virtual, network=NETWORKS["office"]), (1, 2, 3, 8), VIRTUAL),
        (functools.partial(on_virtual, faults=Spoiled), (1, 2, 3), VIRTUAL),
    ],
    ids=["solo", "gloo", "throttled", "staged", "virtual", "spoiled by nothing"],
)
def test_a_group_of_ours_keeps_the_laws(run: Any, ranks: tuple[int, ...], claims: dict[str, Any]) -> None:
    assert group_faults(run, ranks, **claims) == []


BROKEN = [
    (CountsFromOne, "(rank, size, has a name): found (1, 1, True) on rank 0"),
    (SumsInSixteenBits, "allreduce of 7 x torch.float32"),
    (SwapsTwoRanksChunks, "rank 0 of 2: alltoall_base of 1 x torch.float32: 2 of 2 elements"),
    (MistakesTheRoot, "rank 0 of 2: broadcast of 7 x torch.float32: 7 of 7 elements"),
    (MistakesTheRoot, "2 ranks that disagree in root: expected an error on every rank"),
    (QuietsNaN, "expected nan, found nan"),
    (CompletesOutOfOrder, "in flight"),
    (CompletesEarly, "all_gather_single: expected an incomplete work"),
    (SharesWithItsSiblings, "on its private sibling with another under way"),
]


@pytest.mark.parametrize(("kind", "words"), BROKEN, ids=lambda value: getattr(value, "__name__", None))
def test_a_broken_group_breaks_the_law_that_names_its_fault(kind: type[Spoiled], words: str) -> None:
    faults = group_faults(functools.partial(on_virtual, faults=kind), (1, 2), **VIRTUAL)
    assert any(words in text for text in faults), faults
