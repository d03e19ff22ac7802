"""An interpreter ends by itself after a failure, also with a round in flight that will never be complete."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
SECONDS_TO_END = 240.0
"""Starting Python, the backend's timeout (that of the job and a margin), and room for a busy machine."""
PROGRAM = """
import sys
import torch.distributed as dist
from stretto import Options
from tests.errors.tiny import TinyJob

rank, store = int(sys.argv[1]), dist.TCPStore("127.0.0.1", int(sys.argv[2]), is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
job = TinyJob("acco", options=Options(timeout_seconds=2.0))
job.until_update()
if rank == 0:
    with job.parallel:
        job.loss()  # takes off: the lane waits for a peer that has not
        raise ValueError("column 'text' is missing")
store.wait(["rank 0 has ended"])
for _ in range(100):
    job.until_update()
"""


@pytest.mark.long
def test_both_interpreters_end_after_one_raised_in_mid_flight_and_the_other_was_silent() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(store.port)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        _, first = ranks[0].communicate(timeout=SECONDS_TO_END)
        store.set("rank 0 has ended", "")
        _, second = ranks[1].communicate(timeout=SECONDS_TO_END)
    finally:
        for rank in ranks:
            rank.kill()
    assert "ValueError: column 'text' is missing" in first
    assert "PeerFailed: rank 1, after step 1, waiting for the " in second
    assert "rank 0, after step 1: ValueError: column 'text' is missing" in second
