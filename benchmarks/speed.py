"""Throughput of every strategy and every stock method over real sockets that are slow, against the time model.

    python benchmarks/speed.py --out benchmarks/results/DATE-speed

Needs root for the namespaces. Two workers, one thread each, in turns; ratios are taken within a repeat. For every
rate the folder gets compare.json and a table; `time-model.json` holds measured and predicted seconds per update.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from namespaces import Namespaces

from stretto.recipes import StdlibGPT

STOCK = ("torch-ddp", "torch-ddp-bf16", "torch-ddp-zero", "torch-fsdp2")
FIXED = ("ddp", "zero1", "dpu", "wp", "acco")
NARROW = ("zero1:wire=bf16", "wp:wire=bf16", "acco:wire=bf16")
"""A 16-bit wire, for rates at which it has something to save."""
FAST = ("1gbit", "none")
"""Rates at which it has not."""


def all_arms(rate: str) -> list[str]:
    """Return what is measured behind links of `rate`.

    The clock's minimum keeps what an exchange takes of a processor under a few percent of the round.
    """
    if rate in FAST:
        return ["compute", *STOCK, *FIXED, "wp:clock=16,64", "acco:clock=12,64"]
    clock = ("wp:clock=8,32", "acco:clock=4,32", "wp:wire=bf16:clock=8,32", "acco:wire=bf16:clock=4,32")
    return ["compute", *STOCK, *FIXED, *NARROW, *clock]


def measure(rate: str, arms: list[str], seconds: float, repeats: int, out: Path) -> dict:
    """Run the arms in turns behind links of `rate`; return compare.json."""
    command = [sys.executable, "-m", "stretto", "compare", "stdlib-gpt", "--strategies", ",".join(arms)]
    command += ["--seconds", str(seconds), "--repeats", str(repeats), "--out", str(out)]
    command += ["--evaluate-every", "None", "--task.evaluation-windows", "16"]
    with Namespaces(2, rate) as network:
        codes = network.run(command)
    if any(codes):
        raise SystemExit(f"a worker failed: exit codes {codes}")
    return json.loads((out / "compare.json").read_text())


def shares(comparison: dict) -> dict[str, list[float]]:
    """Return every arm's samples per second as a share of `compute` in the same repeat."""
    runs = comparison["runs"]
    limit = {run["repeat"]: run["samples_per_second"] for run in runs if run["strategy"] == "compute"}
    found: dict[str, list[float]] = {}
    for run in runs:
        if run["samples_per_second"] is None:
            raise SystemExit(f"{run['strategy']} made too few updates for a steady rate: raise --seconds")
        share = run["samples_per_second"] / limit[run["repeat"]]
        found.setdefault(run["strategy"], []).append(share)
    return found


def seconds_per_update(comparison: dict, strategy: str) -> float:
    """Return the median steady time of an update of a strategy with fixed counts."""
    samples_per_update = next(
        run["samples"] / run["updates"] for run in comparison["runs"] if run["strategy"] == strategy
    )
    rates = [run["samples_per_second"] for run in comparison["runs"] if run["strategy"] == strategy]
    return samples_per_update / statistics.median(rates)


def step_seconds(repeats: int = 20) -> float:
    """Return the median time of the recipe's optimizer step over one rank's shard, half the parameters."""
    torch.set_num_threads(1)
    task = StdlibGPT().build(0, 1, 0, None)
    for parameter in task.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        task.optimizer.step()
        times.append(time.perf_counter() - started)
    return statistics.median(times) / 2


def time_model(comparison: dict) -> dict[str, dict[str, float]]:
    """Predict every fixed-count strategy from n·t, C and B; see docs/time-model.md.

    n·t is `compute`'s update. C is the time of ZeRO-1's communication lane, where nothing runs beside it. O, the
    preview that prediction makes beside it, is taken to cost what the same shard's step does. B is what an
    exchange takes of a processor, ZeRO-1's processor time less `compute`'s: a worker has one core here, so what
    its lane and its sockets take is missing beside them. `ratio` compares with the times for B = 0, a lane that
    costs nothing; `ratio_one_core` with those for the measured B.
    """

    def per_update(strategy: str, field: str) -> float:
        runs = [run for run in comparison["runs"] if run["strategy"] == strategy]
        return statistics.median(run[field] / run["updates"] for run in runs)

    compute = seconds_per_update(comparison, "compute")
    step = step_seconds()
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
    options = parser.parse_args()
    for rate in options.rates:
        out = options.out / rate
        comparison = measure(rate, options.arms or all_arms(rate), options.seconds, options.repeats, out)
        for strategy, found in shares(comparison).items():
            median, low, high = statistics.median(found), min(found), max(found)
            print(f"{rate:8} {strategy:30} {median:6.1%} of compute ({low:.1%} to {high:.1%})", flush=True)
        if options.arms is None:
            report_time_model(rate, time_model(comparison), out)


def report_time_model(rate: str, models: dict[str, dict[str, float]], out: Path) -> None:
    """Write and print how the measured times compare with the predicted ones."""
    (out / "time-model.json").write_text(json.dumps(models, indent=1) + "\n")
    for strategy in FIXED:
        ratios = models[strategy]
        told = f"{ratios['ratio']:.3f}, with B {ratios['ratio_one_core']:.3f}"
        print(f"{rate:8} {strategy:30} measured / model {told}", flush=True)


if __name__ == "__main__":
    main()
