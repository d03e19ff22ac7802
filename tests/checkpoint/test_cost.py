"""What one rank does for a save does not grow with the number of ranks, and the manifest says little of each."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import stretto as st
from stretto import checkpoint
from stretto.checkpoint.manifest import FILE
from stretto_lab.virtual import VirtualCluster

FEW, MANY = 8, 48
MOST_MANIFEST_BYTES = 64
"""For each rank: the length of its share, and its digest."""
MOST_READ = 10
"""Calls for what rank 0 reads of each other rank: that its share is there, and how long it is."""
PARTS = ("stretto/checkpoint", "stretto/share", "stretto/dealing", "stretto/continuation", "stretto/flat")


def cost(ranks: int, folder: Path) -> tuple[list[int], list[int], int]:
    """Return calls of every rank in a save, bytes of every share's head, and those of the manifest."""

    def program(rank: int, group: Any) -> int:
        torch.manual_seed(0)
        model = nn.Linear(64, 512, bias=False)
        options = st.Options(bucket_bytes=4 * 8192)
        parallel = st.DataParallel(model, torch.optim.AdamW(model.parameters()), group=group, options=options)
        parallel.backward(model(torch.ones(1, 64)).square().sum())
        calls = 0

        def count(frame: FrameType, event: str, _: object) -> None:
            nonlocal calls
            calls += event == "call" and any(part in frame.f_code.co_filename for part in PARTS)

        sys.setprofile(count)
        checkpoint.save(parallel, folder)
        sys.setprofile(None)
        return calls

    calls = list(VirtualCluster(ranks).run(program).values)
    path = checkpoint.latest(folder)
    assert path is not None
    heads = [int.from_bytes((path / f"{rank}.share").read_bytes()[8:16]) for rank in range(ranks)]
    return calls, heads, (path / FILE).stat().st_size


def test_a_save_costs_a_rank_the_same_among_many_ranks_as_among_few(tmp_path: Path) -> None:
    few, many = (cost(ranks, tmp_path / str(ranks)) for ranks in (FEW, MANY))
    for kind, (first, *others), (first_of_many, *others_of_many) in zip(
        ("calls", "bytes"), few, many, strict=False
    ):
        assert max(others_of_many) <= 1.2 * max(others), kind
        assert first_of_many <= 1.2 * first + (MOST_READ * (MANY - FEW) if kind == "calls" else 0), kind
    assert many[2] - few[2] <= MOST_MANIFEST_BYTES * (MANY - FEW)
