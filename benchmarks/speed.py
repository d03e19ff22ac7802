"""Throughput of every strategy and every stock method over slow sockets, against the time model.

    python benchmarks/speed.py --out benchmarks/results/DATE-speed

Needs root for the namespaces. Two workers, one thread each. Arms run in turns, and ratios are taken within a repeat.
Every rate has a folder with compare.json; its time-model.json has measured and predicted seconds per update.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from namespaces import compare_behind

from stretto_lab.observe import replace_json
from stretto_lab.observe.tables import shares_of_limit
from stretto_lab.recipes import StdlibGPT

STOCK = ("torch-ddp", "torch-ddp-bf16", "torch-ddp-zero", "torch-fsdp2")
FIXED = ("ddp", "zero1", "dpu", "wp", "acco")
NARROW = ("zero1:wire=bf16", "wp:wire=bf16", "acco:wire=bf16")
"""Arms with a 16-bit wire, for rates at which that can save something."""
FAST = ("1gbit", "none")
"""Rates at which it cannot."""


EVALUATION = ("--evaluate-every", "None", "--task.evaluation-windows", "16")


def all_arms(rate: str) -> list[str]:
    """Return what is measured behind links of `rate`.

    The smallest counts of the clock keep the processor time of an exchange at a few percent of a round.
    """
    if rate in FAST:
        return ["compute", *STOCK, *FIXED, "wp:clock=16,64", "acco:clock=12,64"]
    clock = ("wp:clock=8,32", "acco:clock=4,32", "wp:wire=bf16:clock=8,32", "acco:wire=bf16:clock=4,32")
    return ["compute", *STOCK, *FIXED, *NARROW, *clock]


def shares(comparison: dict) -> dict[str, list[float]]:
    """Return every arm's samples per second as a share of `compute` in the same repeat."""
    runs = comparison["runs"]
    for run in runs:
        if run["samples_per_second"] is None:
            raise SystemExit(f"{run['strategy']} made too few updates for a steady rate: raise --seconds")
    arms = dict.fromkeys(run["strategy"] for run in runs)
    return {arm: shares_of_limit([run for run in runs if run["strategy"] == arm], runs) for arm in arms}


def seconds_per_update(comparison: dict, strategy: str) -> float:
    """Return the median seconds of a steady update; for strategies with fixed counts."""
    samples_per_update = next(
        run["samples"] / run["updates"] for run in comparison["runs"] if run["strategy"] == strategy
    )
    rates = [run["samples_per_second"] for run in comparison["runs"] if run["strategy"] == strategy]
    return samples_per_update / statistics.median(rates)


def step_seconds(device: str, repeats: int = 20) -> float:
    """Return the median seconds of the recipe's optimizer step over one rank's shard, half of the parameters."""
    torch.set_num_threads(1)
    task = StdlibGPT().build(0, 1, 0, None)
    task.model.to(device)
    for parameter in task.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        task.optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times) / 2


def time_model(comparison: dict, device: str) -> dict[str, dict[str, float]]:
    """Predict every fixed-count strategy from n·t, C and B; see docs/time-model.md.

    n·t is an update of `compute`. C is the time of ZeRO-1's communication lane, which has nothing beside it. O is the
    cost of a preview, taken to be that of the shard's step. B is the processor time of an exchange: that of ZeRO-1 less
    that of `compute`. A worker has one core here, so computing loses what lane and sockets take. `ratio` is measured
    over predicted time for B = 0, `ratio_one_core` for the measured B.
    """

    def per_update(strategy: str, field: str) -> float:
        runs = [run for run in comparison["runs"] if run["strategy"] == strategy]
        return statistics.median(run[field] / run["updates"] for run in runs)

    compute = seconds_per_update(comparison, "compute")
    step = step_seconds(device)
    exchanges = {"ddp": per_update("ddp", "lane_seconds"), "zero1": per_update("zero1", "lane_seconds")}
    busy = max(0.0, per_update("zero1", "cpu_seconds") - per_update("compute", "cpu_seconds"))

    def predicted(busy: float) -> dict[str, float]:
        exchange = exchanges["zero1"]
        return {
            "ddp": compute + exchanges["ddp"],
            "zero1": compute + exchange,
            "dpu": max(compute + busy, exchange),
            "wp": max(compute + busy, exchange + step),
            "acco": 2 * max(compute / 2 + busy, exchange),
        }

    free, one_core = predicted(0.0), predicted(busy)
    models = {"inputs": {"n_t": compute, "C": exchanges["zero1"], "O": step, "B": busy}}
    for strategy in free:
        measured = seconds_per_update(comparison, strategy)
        models[strategy] = {
            "predicted": free[strategy],
            "predicted_one_core": one_core[strategy],
            "measured": measured,
            "ratio": measured / free[strategy],
            "ratio_one_core": measured / one_core[strategy],
        }
    return models


def main() -> None:
    """Measure at every rate and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"])
    parser.add_argument("--arms", nargs="+", help="only these, `compute` among them; no time model then")
    parser.add_argument("--seconds", type=float, default=20.0, help="training time of a run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--device", default="cpu", help="cpu, or cuda: where models live; a link can slow processors alone"
    )
    options = parser.parse_args()
    limits = [
        "--seconds",
        str(options.seconds),
        "--repeats",
        str(options.repeats),
        "--device",
        options.device,
    ]
    for rate in options.rates:
        out = options.out / rate
        comparison = compare_behind(rate, options.arms or all_arms(rate), out, *limits, *EVALUATION)
        for strategy, found in shares(comparison).items():
            median, low, high = statistics.median(found), min(found), max(found)
            print(f"{rate:8} {strategy:30} {median:6.1%} of compute ({low:.1%} to {high:.1%})", flush=True)
        if options.arms is None:
            report_time_model(rate, time_model(comparison, options.device), out)


def report_time_model(rate: str, models: dict[str, dict[str, float]], out: Path) -> None:
    """Write and print how the measured times compare with the predicted ones."""
    replace_json(out / "time-model.json", models)
    for strategy in FIXED:
        ratios = models[strategy]
        told = f"{ratios['ratio']:.3f}, with B {ratios['ratio_one_core']:.3f}"
        print(f"{rate:8} {strategy:30} measured / model {told}", flush=True)


if __name__ == "__main__":
    main()
