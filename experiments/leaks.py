"""Many jobs, one after the other in the same processes: do descriptors, threads, groups or memory grow?

    python experiments/leaks.py --jobs 500 --ranks 2

Linux only: the numbers are those of /proc. Groups of ended jobs are given back eight at a time, so descriptors and
threads rise and fall; after the first hundred jobs they must not rise any more.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn

import stretto
from stretto.groups import Link
from stretto_lab.train.launch import Ranks
from stretto_lab.train.workers import RankInfo, joined_group

LINES = 10


def one_job() -> None:
    """Train a small model for two updates."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    with stretto.DataParallel(model, optimizer, stretto.ACCO(), micro_batches=2) as parallel:
        for _ in range(4):
            parallel.backward(model(torch.randn(4, 8)).square().mean())
        parallel.finish()


def held() -> str:
    """Return what this process holds."""
    groups = len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return (
        f"{len(os.listdir('/proc/self/fd')):4} descriptors {len(os.listdir('/proc/self/task')):4} threads "
        f"{groups:3} groups {pages * os.sysconf('SC_PAGE_SIZE') / 2**20:7.1f} MiB"
    )


def many_jobs(info: RankInfo, jobs: int) -> list[str]:
    """Run the jobs on one rank and return a line now and then."""
    torch.set_num_threads(1)
    lines = []
    with joined_group(info, Link.parse("none"), torch.device("cpu"), 60.0):
        for number in range(1, jobs + 1):
            one_job()
            if number % max(1, jobs // LINES) == 0:
                lines.append(f"rank {info.rank}, after {number:4} jobs: {held()}")
        dist.barrier()
    return lines


def main() -> None:
    """Run all jobs and print what the ranks hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    for lines in Ranks.local(options.ranks).call(many_jobs, options.jobs):
        print("\n".join(lines))


if __name__ == "__main__":
    main()
