"""How a job waits for collectives: never with a timeout where that would end the group; and that it keeps none."""

import gc
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import stretto as st
from stretto.strategies import STRATEGIES
from tests.draws import part
from tests.errors.tiny import TinyJob
from tests.groups.nccl_like import ASKED, LATE, NcclLikeGroup
from tests.processes import run_ranks

LONG = timedelta(seconds=60)
WIRES = ("fp32", "bf16", "int8")


def keep_waiting(seconds: str) -> None:
    """Return once another rank has waited for this one for so long."""
    store = dist.group.WORLD.get_group_store()
    store.set(LATE, seconds)
    store.wait([ASKED], LONG)


def trained(
    rank: int,
    strategy: st.Strategy,
    group: dist.ProcessGroup,
    after: dict[int, Callable[[st.DataParallel], None]],
    *,
    updates: int = 20,
    guards: Any = (),
    **options: Any,
) -> Tensor:
    """Train, and call what is due `after` an update; return all parameters."""
    settings = st.Options(bucket_bytes=64, **options)
    job = TinyJob(strategy, rank=rank, group=group, guards=guards, options=settings)
    while job.parallel.steps < updates:
        step = job.until_update().step
        after.get(step, lambda _: None)(job.parallel)
    job.parallel.finish()
    return torch.cat([p.detach().flatten() for p in job.model.parameters()])


def trained_twice(rank: int, strategy: st.Strategy, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """On the emulated group the last rank enters its third round only when another has waited for it."""
    plain = trained(rank, strategy, dist.group.WORLD, {}, **options)
    late = {2: lambda _: keep_waiting("0")} if rank == 1 else {}
    return plain, trained(rank, strategy, NcclLikeGroup(), late, **options)


@pytest.mark.long(keep=1)
@pytest.mark.parametrize("name", [*part(STRATEGIES), "zero1 with guards"])
def test_a_late_rank_is_waited_for_without_a_timeout_where_that_would_abort_the_group(name: str) -> None:
    if name in STRATEGIES:
        number = list(STRATEGIES).index(name)
        strategy = STRATEGIES[name]()
        options: dict[str, Any] = {"wire": WIRES[number % len(WIRES)], "verified": number % 2 == 0}
    else:
        strategy, options = st.ZeRO1(), {"guards": "standard", "verified": True}
    for plain, emulated in run_ranks(2, trained_twice, strategy, options):
        torch.testing.assert_close(emulated, plain, rtol=0, atol=0)


def growth_by_wrapping(rank: int) -> float:
    """Return by how many times the model's bytes a process grows when it wraps it."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = resident_bytes()
    st.DataParallel(model, optimizer, st.ZeRO1())
    return (resident_bytes() - before) / (4 * LAYERS * WIDTH**2)


WIDTH, LAYERS = 2048, 4


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_no_copy_of_the_model_is_left_once_a_job_has_begun() -> None:
    # Gradients, half of the masters, and room for what torch needs itself. What the start has sent would be one more.
    assert max(run_ranks(2, growth_by_wrapping)) < 2
