"""Real time and memory of a simulated run, from 16 to 1,024 ranks.

Every world size runs in a fresh process: 50 updates of a tiny linear model by ACCO, two micro-batches each, on an
office network with jitter. The seconds leave out imports and the first optimizer, which cost the same at any size.

    python experiments/virtual_scale.py --out benchmarks/results/DATE-virtual-scale
"""

import argparse
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stretto as st
from stretto.machine import describe_environment, peak_resident_bytes
from stretto_lab.observe import replace_json
from stretto_lab.virtual import NETWORKS, Compute, Transfer, VirtualCluster, VirtualGroup

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
    """Simulate one world size in this process, and return what that took."""
    torch.set_num_threads(1)
    VirtualCluster(2).run(program(1))
    baseline = peak_resident_bytes()
    cluster = VirtualCluster(world_size, network=NETWORKS["office"], compute=Compute(jitter=0.1))
    started, cpu_started = time.perf_counter(), time.process_time()
    results = cluster.run(program(updates))
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    mebibytes = (peak_resident_bytes() - baseline) / 2**20
    if set(results.values) != {updates}:
        raise RuntimeError(f"expected {updates} updates on every rank, found {sorted(set(results.values))}")
    return {
        "world_size": world_size,
        "updates": updates,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "milliseconds_per_rank_and_update": 1e3 * seconds / world_size / updates,
        "mebibytes": mebibytes,
        "mebibytes_per_rank": mebibytes / world_size,
        "collectives": sum(isinstance(record, Transfer) for record in results.trace.records),
        "virtual_seconds": results.elapsed_ns / 1e9,
    }


def main() -> None:
    """Measure all world sizes and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--updates", type=int, default=50)
    options = parser.parse_args()
    rows = []
    for world_size in options.ranks:
        with get_context("spawn").Pool(1) as pool:
            rows.append(pool.apply(measure, (world_size, options.updates)))
        print(rows[-1], flush=True)
    report = {"runs": rows, "environment": describe_environment()}
    replace_json(options.out / "virtual-scale.json", report)


if __name__ == "__main__":
    main()
