"""Does hiding the communication cost loss? Paired seeds, equal samples, a fixed batch.

Every arm trains the same language model on the same micro-batches in the same order, through `DataParallel` on one
rank: staleness and estimates depend on rounds, not on the number of ranks, and so several runs go side by side. The
learning rate is tuned for the synchronous arm, on a seed that serves for nothing else, and used for all arms.

    python experiments/learning.py --out benchmarks/results/DATE-learning
"""

import argparse
import statistics
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from intervals import Interval, difference

import stretto as st
from stretto.observe import replace_json
from stretto.recipes import StdlibGPT
from stretto.recipes.optimizers import Schedule
from stretto.strategies import strategy_by_name
from stretto.train.outcome import describe_environment

SYNCHRONOUS = "zero1"
ARMS = ("acco", "wp", "dpu")
TUNING_SEEDS = (1000,)


@dataclass(frozen=True)
class Run:
    """One training run."""

    strategy: str
    lr: float
    seed: int
    updates: int
    micro_batches: int = 2
    layers: int = 2
    width: int = 64
    heads: int = 4
    context: int = 64
    batch: int = 8
    warmup: int = 100
    clip_norm: float = 1.0


def train(run: Run) -> dict[str, float | int | str]:
    """Train once; return the run's fields, its number of parameters, held-out loss and seconds."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    config = StdlibGPT(
        layers=run.layers,
        width=run.width,
        heads=run.heads,
        context=run.context,
        batch=run.batch,
        lr=run.lr,
        schedule=Schedule(warmup=run.warmup),
        evaluation_windows=1024,
    )
    task = config.build(0, 1, run.seed, run.updates)
    parallel = st.DataParallel(
        task.model,
        task.optimizer,
        strategy_by_name(run.strategy),
        micro_batches=run.micro_batches,
        options=st.Options(clip_norm=run.clip_norm),
    )
    batches = iter(task.loader)
    committed = 0
    for _ in range(run.updates * run.micro_batches):
        loss = task.loss(task.model, next(batches))
        if parallel.backward(loss.value, loss.weight, loss.samples):
            committed += 1
            task.scheduler.step()
    committed += len(parallel.finish())
    return {
        **asdict(run),
        "committed": committed,
        "parameters": sum(parameter.numel() for parameter in task.model.parameters()),
        "heldout_loss": task.evaluate(task.model),
        "seconds": time.perf_counter() - started,
    }


def tune(pool: ProcessPoolExecutor, rates: list[float], updates: int) -> tuple[float, list[dict]]:
    """Return the learning rate at which the synchronous arm ends lowest, and the runs that say so."""
    pending = [
        pool.submit(train, Run(SYNCHRONOUS, rate, seed, updates)) for rate in rates for seed in TUNING_SEEDS
    ]
    runs = [collected(future) for future in pending]
    means = {rate: statistics.mean(r["heldout_loss"] for r in runs if r["lr"] == rate) for rate in rates}
    return min(means, key=means.__getitem__), runs


def collected(future: "Future[dict]") -> dict:
    """Wait for one run and say how it went."""
    run = future.result()
    print(f"{run['strategy']:6} lr {run['lr']:.4g} seed {run['seed']}: {run['heldout_loss']:.4f} "
          f"({run['seconds']:.0f} s)", flush=True)  # fmt: skip
    return run


def compare(runs: list[dict], arm: str) -> Interval:
    """Return the paired difference of held-out loss to the synchronous arm, in nats."""
    loss = {(run["strategy"], run["seed"]): run["heldout_loss"] for run in runs}
    seeds = sorted({run["seed"] for run in runs})
    return difference([loss[arm, seed] for seed in seeds], [loss[SYNCHRONOUS, seed] for seed in seeds])


def main() -> None:
    """Tune, run all arms on all seeds, write `learning.json` and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for learning.json")
    parser.add_argument("--updates", type=int, default=1500, help="committed updates per run")
    parser.add_argument("--seeds", type=int, default=5, help="paired seeds, at least 2")
    parser.add_argument("--rates", type=float, nargs="+", default=[4e-3, 8e-3, 1.6e-2])
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, one thread each")
    options = parser.parse_args()
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        rate, tuning = tune(pool, options.rates, options.updates)
        print(f"learning rate of the synchronous arm: {rate:g}", flush=True)
        pending = [
            pool.submit(train, Run(strategy, rate, seed, options.updates))
            for seed in range(options.seeds)
            for strategy in (SYNCHRONOUS, *ARMS)
        ]
        runs = [collected(future) for future in pending]
    differences = {arm: compare(runs, arm) for arm in ARMS}
    report = {"learning_rate": rate, "differences": differences, "runs": runs, "tuning": tuning,
              "environment": describe_environment()}  # fmt: skip
    replace_json(options.out / "learning.json", report)
    for arm, found in differences.items():
        print(f"{arm:6} {found['mean']:+.4f} nats, 95 % [{found['low']:+.4f}, {found['high']:+.4f}]")


if __name__ == "__main__":
    main()
