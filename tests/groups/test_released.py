"""Groups of jobs that have ended are given back: a process can have any number of jobs, one after the other."""

import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stretto
from stretto.groups import SoloGroup, retire
from tests.processes import run_ranks

JOBS = 20
"""Far more than are kept, and few enough for a suite; experiments/leaks.py runs 500."""
GROUPS = 9
"""Those that are kept, and that of the job that runs: each has three threads and five descriptors."""


def held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def many_jobs(rank: int, part: list[int] | None = None) -> tuple[int, int]:
    """Run jobs over all ranks, or over a part of them; return how many threads and descriptors are left."""
    before = held()
    for _ in range(JOBS if part is None or rank in part else 0):
        model = nn.Linear(4, 4)
        parallel = stretto.DataParallel(
            model, torch.optim.SGD(model.parameters(), lr=0.1), stretto.ACCO(), micro_batches=2, ranks=part
        )
        for _ in range(2):
            parallel.backward(model(torch.ones(2, 4)).square().mean())
        parallel.finish()
    threads, descriptors = held()
    return threads - before[0], descriptors - before[1]


@pytest.mark.skipif(sys.platform != "linux", reason="threads and descriptors are counted in /proc")
def test_many_jobs_of_one_process_leak_nothing() -> None:
    for threads, descriptors in [*run_ranks(2, many_jobs), *run_ranks(3, many_jobs, [1, 2]), many_jobs(0)]:
        # The first job of a process also starts what stays: the autograd engine, torch's own threads and pipes.
        assert threads <= 3 * GROUPS + 8
        assert descriptors <= 5 * GROUPS + 16


def retired_and_used(rank: int) -> float:
    group = dist.new_group()
    retire(group)
    tensor = torch.ones(1)
    group.allreduce([tensor]).wait()
    return tensor.item()


def test_a_group_that_is_retired_can_still_be_used() -> None:
    assert run_ranks(2, retired_and_used) == [2.0, 2.0]


def test_a_group_that_torch_does_not_know_is_not_kept() -> None:
    group = SoloGroup()
    before = sys.getrefcount(group)
    retire(group)
    assert sys.getrefcount(group) == before
