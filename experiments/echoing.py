"""What another use of a batch is worth: held-out loss of echoed training at equal fresh loads, learning rates tuned.

    python experiments/echoing.py --out benchmarks/results/DATE-echo-learning

The recipe digits-resnet on one rank, one micro-batch per update. All arms but `spaced` take the same fresh batches:

    fresh      every batch once
    spaced     as many steps as the echoed arms, every batch fresh: what re-reading would give
    even       1 / 0.55 = 1.82 uses of every batch
    bernoulli  a fresh batch with p = 0.55
    falling    p from 1 to 0.1 on a cosine: the published schedule; on average 0.55
    rising     the reverse
    even3      3 uses of every batch

The learning rate of every arm is the best of a grid on seeds of their own. Every run is recorded on four axes: steps,
fresh samples, seconds with a loader that is `--ratio` times slower than a step and read ahead (modelled: steps and
loads overlap, whichever is longer counts), bytes (two ranks, one exchange of all gradients and parameters per step).
Differences to `fresh` are paired by seed, with a 95 % t-interval.
"""

import argparse
import json
import statistics
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from scipy import stats

from stretto import Bernoulli, DataParallel, EchoLoader, EchoOptions, Even, ZeRO1
from stretto.echo import Cosine, Plan
from stretto.echo.length import epoch_length
from stretto.recipes import DigitsResNet
from stretto.train.environment import describe_environment

MEAN_P = 0.55
LOWEST_P = 0.1
ARMS = ("fresh", "spaced", "even", "bernoulli", "falling", "rising", "even3")
REFERENCE = "fresh"
TUNING_SEEDS = (100, 101)
"""Apart from the seeds that are compared."""
RATES = {32: (0.02, 0.04, 0.08, 0.16, 0.32), 256: (0.04, 0.08, 0.16, 0.32, 0.64)}
"""Grids for the two batch sizes."""


@dataclass(frozen=True)
class Run:
    """One run."""

    arm: str
    batch: int
    lr: float
    seed: int
    loads: int
    """Fresh batches; `spaced` takes more."""
    points: int = 20
    """Evaluations along the run."""


def plan_of(run: Run) -> tuple[Plan, int]:
    """Return the arm's plan and its number of fresh batches."""
    steps = round(run.loads / MEAN_P)
    plans: dict[str, tuple[Plan, int]] = {
        "fresh": (Even(1), run.loads),
        "spaced": (Even(1), steps),
        "even": (Even(1 / MEAN_P), run.loads),
        "bernoulli": (Bernoulli(MEAN_P), run.loads),
        "falling": (Bernoulli(Cosine(1.0, LOWEST_P, steps)), run.loads),
        "rising": (Bernoulli(Cosine(LOWEST_P, 1.0, steps)), run.loads),
        "even3": (Even(3), run.loads),
    }
    return plans[run.arm]


def train(run: Run) -> dict[str, Any]:
    """Train once; return the run's fields and its curve."""
    torch.set_num_threads(1)
    plan, loads = plan_of(run)
    steps = epoch_length(plan.chooser(run.seed), loads, 0)
    task = DigitsResNet(batch=run.batch, lr=run.lr).build(0, 1, run.seed, steps)
    task.loader.micro_batches = loads
    # On the training thread: the runs share the cores.
    loader = EchoLoader(task.loader, plan, options=EchoOptions(seed=run.seed, ahead=0))
    parallel = DataParallel(task.model, task.optimizer, ZeRO1(), micro_batches=1)
    curve, busy = [], 0.0
    started = time.perf_counter()
    for batch in parallel.feed(loader):
        loss = task.loss(task.model, batch)
        update = parallel.backward(loss.value, loss.weight, loss.samples)
        task.scheduler.step()
        if update.step % max(1, steps // run.points) == 0 or update.step == steps:
            busy += time.perf_counter() - started
            with parallel.settled():
                curve.append({"step": update.step, "loads": loader.fresh_batches,
                              "heldout_loss": task.evaluate(task.model), "accuracy": task.accuracy(task.model),
                              "busy_seconds": busy})  # fmt: skip
            started = time.perf_counter()
        if update.step == steps:
            break
    parallel.finish()
    return {**asdict(run), "steps": steps, "curve": curve, "heldout_loss": curve[-1]["heldout_loss"],
            "accuracy": curve[-1]["accuracy"],
            "parameters": sum(parameter.numel() for parameter in task.model.parameters())}  # fmt: skip


def with_axes(run: dict[str, Any], ratio: float) -> dict[str, Any]:
    """Return the run with samples, seconds and bytes beside the steps of its curve."""
    step_seconds = run["curve"][-1]["busy_seconds"] / run["steps"]
    for point in run["curve"]:
        point["fresh_samples"] = point["loads"] * run["batch"]
        point["seconds"] = step_seconds * max(point["step"], ratio * point["loads"])
        # Each of two ranks sends half of the gradients, then half of the parameters, in fp32.
        point["bytes"] = point["step"] * 2 * run["parameters"] // 2 * 4
    return run


def collected(future: "Future[dict[str, Any]]") -> dict[str, Any]:
    """Wait for one run and say how it went."""
    run = future.result()
    print(f"batch {run['batch']:3} {run['arm']:9} lr {run['lr']:.3g} seed {run['seed']:3}: "
          f"{run['heldout_loss']:.4f}, {run['accuracy']:.1%}, {run['steps']} steps", flush=True)  # fmt: skip
    return run


def tune(pool: ProcessPoolExecutor, batch: int, loads: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Return the best learning rate of every arm, and the runs that say so."""
    pending = [
        pool.submit(train, Run(arm, batch, rate, seed, loads))
        for arm in ARMS
        for rate in RATES[batch]
        for seed in TUNING_SEEDS
    ]
    runs = [collected(future) for future in pending]

    def mean(arm: str, rate: float) -> float:
        return statistics.mean(r["heldout_loss"] for r in runs if r["arm"] == arm and r["lr"] == rate)

    return {arm: min(RATES[batch], key=lambda rate: mean(arm, rate)) for arm in ARMS}, runs


def compare(runs: list[dict[str, Any]], arm: str) -> dict[str, float]:
    """Return the paired difference of the final held-out loss to the reference, with a 95 % t-interval, in nats."""
    loss = {(run["arm"], run["seed"]): run["heldout_loss"] for run in runs}
    seeds = sorted({run["seed"] for run in runs})
    differences = [loss[arm, seed] - loss[REFERENCE, seed] for seed in seeds]
    mean = statistics.mean(differences)
    half = stats.t.ppf(0.975, len(seeds) - 1) * statistics.stdev(differences) / len(seeds) ** 0.5
    return {"mean": mean, "low": mean - half, "high": mean + half}


def main() -> None:
    """For each batch size: tune, run all arms on all seeds; write echoing.json after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for echoing.json")
    parser.add_argument("--batches", type=int, nargs="+", choices=list(RATES), default=list(RATES),
                        help="samples per step")  # fmt: skip
    parser.add_argument("--samples", type=int, default=14_400, help="fresh samples: about ten epochs")
    parser.add_argument("--seeds", type=int, default=8, help="paired seeds, at least 2")
    parser.add_argument("--ratio", type=float, default=1 / MEAN_P, help="L / C of the modelled slow loader")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time, one thread each")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"environment": describe_environment(), "ratio": options.ratio, "batches": {}}
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        for batch in options.batches:
            loads = options.samples // batch
            rates, tuning = tune(pool, batch, loads)
            pending = [
                pool.submit(train, Run(arm, batch, rates[arm], seed, loads))
                for seed in range(options.seeds)
                for arm in ARMS
            ]
            runs = [with_axes(collected(future), options.ratio) for future in pending]
            differences = {arm: compare(runs, arm) for arm in ARMS if arm != REFERENCE}
            report["batches"][batch] = {"loads": loads, "learning_rates": rates, "differences": differences,
                                        "runs": runs, "tuning": tuning}  # fmt: skip
            (options.out / "echoing.json").write_text(json.dumps(report, indent=1) + "\n")
            for arm, difference in differences.items():
                print(f"batch {batch:3} {arm:9} lr {rates[arm]:.3g}: {difference['mean']:+.4f} nats, 95 % "
                      f"[{difference['low']:+.4f}, {difference['high']:+.4f}]", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
