"""After a failure every interpreter ends by itself, also with a round in flight that will never be complete."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

SECONDS_TO_END = 60.0
"""Starting Python, the timeout where one is waited for, the backend's margin, and room for a busy machine."""
PROGRAM = """
import sys
import torch.distributed as dist
from stretto import Options
from tests.errors.tiny import TinyJob

rank, port, ending = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
job = TinyJob("acco", options=Options(timeout_seconds=2.0 if ending == "silent" else 600.0))
job.until_update()
if rank == 0:
    if ending == "raises":
        with job.parallel:
            job.loss()  # takes off: the lane waits for a peer that has not
            raise ValueError("column 'text' is missing")
    for _ in range(100):
        job.until_update()
if ending == "silent":
    store.wait(["rank 0 has ended"])
for _ in range(100):
    job.until_update()
"""
CAUSES = {
    "raises": (
        "ValueError: column 'text' is missing",
        "PeerFailed: rank 1, ",
        "rank 0, after step 1: ValueError",
    ),
    "silent": ("PeerSilent: rank 0, ", "PeerSilent: rank 1, ", "from ranks [1]"),
}


ROOT = Path(__file__).resolve().parents[2]


def what_both_wrote(ending: str) -> list[str]:
    """Run both ranks in interpreters of their own and return what each wrote, once it has ended."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(store.port), ending],
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
    return [first, second]


def test_every_interpreter_ends_after_a_failure_and_says_why() -> None:
    # Side by side: starting an interpreter costs more than all the rest.
    with ThreadPoolExecutor(len(CAUSES)) as pool:
        written = dict(zip(CAUSES, pool.map(what_both_wrote, CAUSES), strict=True))
    for ending, (at_rank_0, at_rank_1, cause) in CAUSES.items():
        first, second = written[ending]
        assert at_rank_0 in first, ending
        assert at_rank_1 in second, ending
        assert cause in second, ending
