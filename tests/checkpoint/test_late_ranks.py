"""A job that has finished may still be saved, however late the other ranks come."""

import functools
import threading
from pathlib import Path

import torch

from stretto import DataParallel, checkpoint
from tests.processes import run_program

LATE_SECONDS = 2.5
"""Longer than a rank waits before it looks whether the others live."""


def save_late(folder: str, rank: int, group: torch.distributed.ProcessGroup) -> str:
    model = torch.nn.Linear(3, 2)
    parallel = DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), group=group)
    parallel.backward(model(torch.ones(2, 3)).sum())
    parallel.finish()
    if rank == 1:
        threading.Event().wait(LATE_SECONDS)  # what an evaluation takes on a busy machine
    return checkpoint.save(parallel, folder).name


def test_a_save_after_the_end_waits_for_a_rank_that_comes_late(tmp_path: Path) -> None:
    first, second = run_program(2, functools.partial(save_late, str(tmp_path)))
    assert first == second == "000001-step-1"
