"""Under torchrun: a rank that dies, or raises with a round in flight, ends the job of the other, which says why.

Both interpreters end by themselves.
"""

from pathlib import Path

import pytest

from tests.processes import Command

SCRIPT = """
import os, signal, sys
import torch
import stretto
from torch import nn

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which torchrun ends the others, within a tenth of a second
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
parallel = stretto.DataParallel(model, optimizer, stretto.ACCO(), micro_batches=2)
try:
    with parallel:
        for batch in parallel.feed([torch.ones(2, 4)] * 1000):
            if parallel.rank == 1 and parallel.steps == 3:
                if sys.argv[1] == "is killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("column 'text' is missing")
            parallel.backward(model(batch).square().mean())
        parallel.finish()
except stretto.StrettoError as error:
    print(f"rank {parallel.rank}: {type(error).__name__}: {error}", flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        ("is killed", "rank 1 died or closed its connection"),
        ("raises", "rank 1, after step 3: ValueError: column 'text' is missing"),
    ],
)
def test_both_interpreters_end_after_one_rank_and_the_other_names_it(ends: str, cause: str) -> None:
    Path("script.py").write_text(SCRIPT)
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    # The time-out of a job is ten minutes, and that of this test is five: it ends because the end was noticed.
    with Command("-m", *launcher, "script.py", ends) as torchrun:  # which starts the ranks from nothing
        shown, complaint = torchrun.communicate()
    assert torchrun.returncode == 1
    (line,) = shown.splitlines()
    assert line.startswith("rank 0: PeerFailed: rank 0, after step ")
    assert cause in line
    assert ("ValueError: column 'text' is missing" in complaint) == (ends == "raises")
