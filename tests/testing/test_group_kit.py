"""The library's process groups keep the laws of groups."""

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
    ],
    ids=["solo", "gloo", "throttled", "staged", "virtual"],
)
def test_a_group_of_ours_keeps_the_laws(run: Any, ranks: tuple[int, ...], claims: dict[str, Any]) -> None:
    assert group_faults(run, ranks, **claims) == []
