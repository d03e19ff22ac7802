"""Where a wait with a timeout ends the group, as on NCCL: what takes seconds on one rank or on the link ends right."""

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import stretto as st
from stretto import checkpoint
from stretto.engine import Options
from stretto_lab.observe import Stages
from stretto_lab.plan import Machine
from stretto_lab.plan.measure import Ranks, measure_task
from tests.errors.test_waits import keep_waiting, trained
from tests.groups.nccl_like import NCCL_LIKE, NcclLikeGroup, register_behind_100mbit
from tests.processes import run_ranks
from tests.train.tiny import Tiny

SECONDS = "4"
"""For which the others wait: several looks around."""
SECONDS_OF_A_CHECKPOINT = "5"
STRATEGIES = (st.ZeRO1(), st.ACCO(), st.DiLoCo(2, delay=1))


class SlowLoader:
    """A loader whose position takes one rank seconds to tell."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def state_dict(self) -> dict[str, int]:
        """Its position."""
        self._tell()
        return {"position": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Nothing: it is not loaded."""


def saves_for_seconds(
    rank: int, strategy: st.Strategy, folder: Path, in_background: bool
) -> tuple[Tensor, Tensor]:
    """Train on Gloo without checkpoints, and with one that keeps the last rank for seconds."""

    def save(parallel: st.DataParallel) -> None:
        loader = SlowLoader((lambda: keep_waiting(SECONDS_OF_A_CHECKPOINT)) if rank == 1 else lambda: None)
        checkpoint.save(parallel, folder, loader=loader, async_save=in_background)

    plain = trained(rank, strategy, dist.group.WORLD, {}, updates=3)
    return plain, trained(rank, strategy, NcclLikeGroup(), {1: save}, updates=3)


def test_a_checkpoint_that_takes_one_rank_seconds(tmp_path: Path) -> None:
    jobs = [(strategy, tmp_path / str(number), number % 2 == 0) for number, strategy in enumerate(STRATEGIES)]
    with ThreadPoolExecutor(len(jobs)) as pool:  # side by side, as all they do is wait
        found = list(pool.map(lambda job: run_ranks(2, saves_for_seconds, *job), jobs))
    for plain, saved in [pair for ranks in found for pair in ranks]:
        torch.testing.assert_close(saved, plain, rtol=0, atol=0)
    assert [folder for _, folder, _ in jobs if not checkpoint.latest(folder) is not None] == []


class LateLoader:
    """A loader whose first batch takes one rank seconds."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        keep_waiting(SECONDS)
        return iter(self._loader)


def planned(rank: int) -> Machine:
    task = Tiny(normed=False).build(rank, 2, 0, None)
    if rank == 1:
        task = dataclasses.replace(task, loader=LateLoader(task.loader))
    ranks = Ranks(torch.device("cpu"), Options())
    with Stages(is_shown=False) as stages, ranks.together():
        return measure_task(ranks, task, 2, 1, stages)


@pytest.mark.long
def test_a_plan_behind_100_mbit_with_a_rank_that_is_seconds_late() -> None:
    one, other = run_ranks(2, planned, backend=NCCL_LIKE, prepare=register_behind_100mbit)
    assert one.link == other.link
    assert one.link.bits_per_second == pytest.approx(1e8, rel=0.15)
