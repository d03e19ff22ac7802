"""Simulated update times against those of real workers on a throttled link.

Real runs come first, by `stretto compare`: `compute`, which never communicates, shows what a micro-batch costs; then
every strategy runs on the link. The optimizer step is timed alone, on the shard that a rank owns. The virtual cluster
is given these two costs and the link, and nothing else that was measured. Needs an idle machine.

    python experiments/simulated_against_real.py --out benchmarks/results/DATE-simulated --link 100mbit
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stretto.strategies import strategy_by_name
from stretto.strategies.ledger import ledger_of
from stretto_lab.cli import main as stretto
from stretto_lab.observe import replace_json
from stretto_lab.recipes import StdlibGPT
from stretto_lab.train.simulation import SimulateConfig, simulate

STRATEGIES = ("ddp", "zero1", "dpu", "wp", "acco")
STEADY_FROM = 3
STEPS = 20


def measure_real(out: Path, link: str, updates: int, workers: int) -> dict[str, float]:
    """Run all arms on real workers; return rank 0's seconds per update by arm, without the warm-up."""
    words = [
        "compare", "stdlib-gpt", "--strategies", ",".join(("compute", *STRATEGIES)), "--link", link,
        "--updates", str(updates), "--workers", str(workers), "--evaluate-every", "None", "--out", str(out),
    ]  # fmt: skip
    if stretto(words) != 0:
        sys.exit("the real runs failed")
    runs = json.loads((out / "compare.json").read_text())["runs"]
    samples = {run["strategy"]: run["samples"] / run["updates"] for run in runs}
    return {run["strategy"]: samples[run["strategy"]] / run["samples_per_second"] for run in runs}


def measure_step(numel: int) -> float:
    """Return the median seconds of one AdamW step over `numel` elements, alone on one thread."""
    torch.set_num_threads(1)
    master = nn.Parameter(torch.randn(numel))
    optimizer = torch.optim.AdamW([master], fused=True)
    master.grad = torch.randn(numel)
    taken = []
    for _ in range(STEPS):
        started = time.perf_counter()
        optimizer.step()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def simulate_update(strategy: str, micro_batch: float, step: float, options: argparse.Namespace) -> float:
    """Return the virtual seconds of one update, once a run is under way."""
    simulation = SimulateConfig(
        task=StdlibGPT(),
        strategy=strategy,
        ranks=options.workers,
        network=options.link,
        micro_batch_ms=1e3 * micro_batch,
        step_ms=1e3 * step,
        updates=STEADY_FROM + 4,
    )
    outcome = simulate(simulation).values[0]
    if outcome.samples_per_second is None:
        raise RuntimeError("a simulated run was too short for a rate")
    return outcome.samples / outcome.updates / outcome.samples_per_second


def main() -> None:
    """Run both, and write and print how far they are apart."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--link", default="100mbit")
    parser.add_argument("--updates", type=int, default=15)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    real = measure_real(options.out, options.link, options.updates, options.workers)
    task = StdlibGPT().build(0, options.workers, 0, 1)
    numel = sum(parameter.numel() for parameter in task.model.parameters())
    # An update that never communicates is its micro-batches and a step over all parameters.
    micro_batch = (real["compute"] - measure_step(numel)) / SimulateConfig(task=StdlibGPT()).micro_batches
    rows: list[dict[str, Any]] = []
    for strategy in STRATEGIES:
        owners = 1 if ledger_of(strategy_by_name(strategy)).replicated else options.workers
        step = measure_step(numel // owners)
        virtual = simulate_update(strategy, micro_batch, step, options)
        apart = virtual / real[strategy] - 1
        rows.append(
            {"strategy": strategy, "real": real[strategy], "virtual": virtual, "apart": apart, "step": step}
        )
        print(f"{strategy:6} real {real[strategy]:.3f} s, virtual {virtual:.3f} s, {apart:+.1%}", flush=True)
    report = {"link": options.link, "micro_batch_seconds": micro_batch, "rows": rows}
    replace_json(options.out / "simulated-against-real.json", report)


if __name__ == "__main__":
    main()
