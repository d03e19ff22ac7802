"""Real time and memory of a simulated run, from 16 to 1,024 ranks.

Every world size runs in a fresh process: 50 updates of a tiny linear model by ACCO, two micro-batches each, on an
office network with jitter. The seconds leave out importing and the first optimizer, the same for any world size.

    python experiments/virtual_scale.py --out benchmarks/results/DATE-virtual-scale
"""

import argparse
import json
import os
import platform
import resource
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stretto as st
from stretto.virtual import NETWORKS, Compute, Transfer, VirtualCluster, VirtualGroup

MICRO_BATCHES = 2


def program(updates: int) -> Any:
    """Return what every rank runs."""

    def train(rank: int, group: VirtualGroup) -> int:
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        draws = torch.Generator().manual_seed(rank)
        batches = [torch.randn(3, 8, generator=draws) for _ in range(updates * MICRO_BATCHES)]
        with st.DataParallel(
            model, optimizer, st.ACCO(), micro_batches=MICRO_BATCHES, group=group
        ) as parallel:
            for batch in parallel.feed(batches):
                parallel.backward(model(batch).square().mean())
            parallel.finish()
            return parallel.steps

    return train


def measure(world_size: int, updates: int) -> dict[str, Any]:
    """Run one world size, in this process, and return what it took."""
    torch.set_num_threads(1)
    VirtualCluster(2).run(program(1))
    baseline = peak_bytes()
    cluster = VirtualCluster(world_size, network=NETWORKS["office"], compute=Compute(jitter=0.1))
    started, cpu_started = time.perf_counter(), time.process_time()
    results = cluster.run(program(updates))
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    if set(results.values) != {updates}:
        raise RuntimeError(f"expected {updates} updates on every rank, found {sorted(set(results.values))}")
    return {
        "world_size": world_size,
        "updates": updates,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "milliseconds_per_rank_and_update": 1e3 * seconds / world_size / updates,
        "mebibytes": (peak_bytes() - baseline) / 2**20,
        "mebibytes_per_rank": (peak_bytes() - baseline) / 2**20 / world_size,
        "collectives": sum(isinstance(record, Transfer) for record in results.trace.records),
        "virtual_seconds": results.elapsed_ns / 1e9,
    }


def peak_bytes() -> int:
    """Return the largest resident memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    """Measure all world sizes and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--updates", type=int, default=50)
    options = parser.parse_args()
    rows = []
    for world_size in options.ranks:
        with get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(measure, (world_size, options.updates)))
        print(rows[-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    environment = {"torch": torch.__version__, "cores": os.cpu_count(), "system": platform.platform()}
    content = {"runs": rows, "environment": environment}
    (options.out / "virtual-scale.json").write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
