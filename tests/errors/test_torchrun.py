"""Under torchrun: a rank that is killed ends the job of the other, which says who died."""

from pathlib import Path

import pytest

from tests.processes import Command

SCRIPT = """
import os, signal
import torch
import stretto
from torch import nn

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which torchrun ends the others, within a tenth of a second
model = nn.Linear(4, 1)
parallel = stretto.DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batches=2)


def kill(update):
    if parallel.rank == 1 and update.step == 3:
        os.kill(os.getpid(), signal.SIGKILL)


try:
    with parallel:
        for batch in parallel.feed([torch.ones(2, 4)] * 1000, on_update=kill):
            parallel.backward(model(batch).square().mean())
        parallel.finish()
except stretto.StrettoError as error:
    print(f"rank {parallel.rank}: {type(error).__name__}: {error}", flush=True)
"""


@pytest.mark.long
def test_the_survivor_of_a_killed_rank_ends_and_names_it() -> None:
    Path("script.py").write_text(SCRIPT)
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    # The time-out of a job is ten minutes, and that of this test is five: it ends because the death was noticed.
    with Command("-m", *launcher, "script.py") as torchrun:  # which starts the ranks from nothing
        shown, _ = torchrun.communicate()
    assert torchrun.returncode == 1
    (line,) = shown.splitlines()
    assert line.startswith("rank 0: PeerFailed: rank 0, after step ")
    assert "rank 1 died or closed its connection" in line
