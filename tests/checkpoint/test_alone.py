"""A checkpoint that one rank alone saves, or loads: it is told what it waits for, who is elsewhere, and what to do."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stretto as st
from stretto import checkpoint
from stretto.errors import StrettoError
from tests.processes import run_ranks

CALLS: dict[str, Callable[[st.DataParallel, str], Any]] = {
    "save": lambda job, folder: checkpoint.save(job, folder),
    "save beside training": lambda job, folder: checkpoint.save(job, folder, async_save=True),
    "load": lambda job, folder: checkpoint.load(job, f"{folder}/000001-step-2"),
}
STRATEGIES = {"zero1": st.ZeRO1, "ddp": st.DDP}
CASES = [*itertools.product(("save", "save beside training", "load"), STRATEGIES, (0, 1))]


def alone(rank: int, folder: str) -> list[str]:
    """Have one rank save or load where the other trains on; return what each case has said here."""
    found = []
    for call, strategy, caller in CASES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        options = st.Options(timeout_seconds=1)
        job = st.DataParallel(model, optimizer, STRATEGIES[strategy](), options=options)
        job.backward(model(torch.ones(2, 4)).sum())
        job.backward(model(torch.ones(2, 4)).sum())
        if call == "load":
            checkpoint.save(job, f"{folder}/{strategy}{caller}")
        try:
            if rank == caller:
                CALLS[call](job, f"{folder}/{strategy}{caller}")
            job.backward(model(torch.ones(2, 4)).sum())
            found.append("nothing")
        except StrettoError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.long
def test_who_waits_for_a_checkpoint_alone_is_told_so(tmp_path: Path) -> None:
    for case, *both in zip(CASES, *run_ranks(2, alone, str(tmp_path)), strict=True):
        caller = case[2]
        told, other = both[caller], both[1 - caller]
        assert told.startswith(f"PeerSilent: rank {caller}, after step 2, "), (case, told)
        assert "a checkpoint, which all ranks do after the same update: " in told, (case, told)
        assert f"rank {1 - caller} for the reduction" in told, (case, told)
        assert other.startswith(f"PeerSilent: rank {1 - caller}, after step 2, waiting for the reduction"), (
            case
        )
        assert "all ranks must enter settled(), checkpoints and finish() alike" in other, (case, other)
        assert len(told.splitlines()) == len(other.splitlines()) == 1
