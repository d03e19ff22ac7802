"""Time to a fixed held-out loss over slow sockets and a free wire, the learning rate tuned for every way of updating.

    python benchmarks/time_to_loss.py --rates none 100mbit 10mbit --out benchmarks/results/DATE-time-to-loss

Needs root for the namespaces. Tuning runs without a slow link, because with fixed counts the updates do not depend on
it. All synchronous arms, ours and the stock ones, make the same updates and share one tuned rate. The measured runs
then stop at the target; time spent on evaluations does not count. With every seed all arms run on all links in turns,
and times are also told as multiples of the fastest synchronous arm on the free wire with the same seed.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

from namespaces import compare_behind

from stretto.observe import replace_json

AVERAGE = "diloco:outer_lr=1:outer_momentum=0:keep_progress=on:wire=int4"
"""Averages of replicas in 4 bits, beside the next updates."""
TUNED = {
    "synchronous": "ddp",
    "acco": "acco:wire=int4",
    "local": "local:rate=0.1:wire=bf16",
    "diloco": f"{AVERAGE}:interval=4:fragments=2:delay=1",
}
"""One arm per way of updating; arms that differ in wire, interval or clock take its rate."""
FREE = ("torch-ddp", "zero1")
"""Synchronous arms on the free wire, the measure of all others."""
SLOW = (
    "torch-ddp-bf16",
    "torch-ddp-powersgd",
    "zero1:wire=int4",
    "acco:wire=int8",
    "local:rate=0.1:wire=bf16",
)
SLOWER = (
    "torch-ddp-powersgd",
    "torch-local-sgd",
    "local:rate=0.1:wire=bf16",
    f"{AVERAGE}:interval=2:delay=1",
    f"{AVERAGE}:interval=4:fragments=2:delay=1",
)
SLOWEST = (f"{AVERAGE}:interval=16:fragments=4:delay=3", f"{AVERAGE}:interval=24:fragments=6:delay=3")
ARMS = {"none": FREE, "10mbit": SLOWER, "1mbit": SLOWEST}
"""By link; `SLOW` for all others."""
EVALUATION = ["--evaluate-every", "4", "--task.evaluation-windows", "32"]
# A run that only time ends keeps its learning rate. Those of the tuning, which a count may end, must keep theirs too.
SCHEDULE = ["--task.schedule.warmup", "10", "--task.schedule.floor", "1"]


def updates_to_target(run: dict) -> float:
    """Return the updates that a run needed to reach the target, or infinity."""
    return float("inf") if run["seconds_to_loss"] is None else run["updates"]


def tune(methods: list[str], rates: list[float], target: float, updates: int, out: Path) -> dict[str, float]:
    """Return by method the rate with which it needs the fewest updates; ties go to the lower final loss."""
    arms = [f"{TUNED[method]}:lr={rate:g}" for method in methods for rate in rates]
    limits = ["--updates", str(updates), "--to-loss", str(target), "--seed", "1000"]
    runs = compare_behind("none", arms, out, *limits, *EVALUATION, *SCHEDULE)["runs"]
    best = {}
    for method in methods:
        candidates = [run for run in runs if run["strategy"].startswith(f"{TUNED[method]}:lr=")]
        chosen = min(candidates, key=lambda run: (updates_to_target(run), run["heldout_loss"]))
        best[method] = chosen["learning_rate"]
        for run in candidates:
            print(
                f"{run['strategy']:40} {updates_to_target(run):5g} updates, {run['heldout_loss']:.4f}",
                flush=True,
            )
    return best


def method_of(arm: str) -> str:
    """Return the key of an arm's tuned rate: all synchronous arms make the same updates."""
    name = arm.partition(":")[0]
    return {"torch-local-sgd": "local"}.get(name, name if name in TUNED else "synchronous")


def measured(out: Path, rate: str) -> Iterator[tuple[int, dict]]:
    """Yield the runs of all repeats on a link, each with its seed."""
    for path in sorted(out.glob(f"{rate}-seed*/compare.json")):
        seed = int(path.parent.name.removeprefix(f"{rate}-seed"))
        yield from ((seed, run) for run in json.loads(path.read_text())["runs"])


def report(out: Path, rates: list[str]) -> None:
    """Print every arm's time to the target over all repeats so far, and as a multiple of a free wire's."""
    free: dict[int, float] = {}
    for seed, run in measured(out, "none"):
        if run["seconds_to_loss"] is not None:
            free[seed] = min(free.get(seed, float("inf")), run["seconds_to_loss"])
    for rate in rates:
        found: dict[str, dict[int, dict]] = {}
        for seed, run in measured(out, rate):
            found.setdefault(run["strategy"], {})[seed] = run
        for arm, runs in found.items():
            seconds = {s: r["seconds_to_loss"] for s, r in runs.items() if r["seconds_to_loss"] is not None}
            told = f"{rate:8} {arm:56} reached {len(seconds)} of {len(runs)}"
            if seconds:
                told += f", {_spread(list(seconds.values()), '.1f')} s"
            if multiples := [seconds[seed] / free[seed] for seed in seconds if seed in free]:
                told += f", {_spread(multiples, '.2f')} of a free wire"
            sent = statistics.median(run["sent_bytes"] / run["updates"] / 1e6 for run in runs.values())
            print(f"{told}, {sent:.2f} MB per update")


def _spread(values: list[float], form: str) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def main() -> None:
    """Tune, measure, print the ranking."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rates", nargs="+", default=["none", "100mbit"], help="of the links")
    parser.add_argument("--target", type=float, default=2.75, help="held-out loss, nats per byte")
    parser.add_argument("--cap", type=float, default=75.0, help="training seconds after which a run gives up")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one repeat each, in turns")
    parser.add_argument("--learning-rates", type=float, nargs="+", default=[7e-4, 1e-3, 1.5e-3])
    parser.add_argument("--tuning-updates", type=int, default=90)
    parser.add_argument("--arms", nargs="+", help="on slow links, instead of those that are built in")
    parser.add_argument("--only-tune", action="store_true", help="end before the measured runs")
    options = parser.parse_args()
    arms = {
        rate: options.arms if options.arms and rate != "none" else ARMS.get(rate, SLOW)
        for rate in options.rates
    }
    # Tuning does not depend on time, so it may have been done before, elsewhere.
    tuned = options.out / "tuned.json"
    best = json.loads(tuned.read_text()) if tuned.exists() else {}
    missing = dict.fromkeys(method_of(arm) for of_rate in arms.values() for arm in of_rate)
    missing = [method for method in missing if method not in best]
    if missing:
        best |= tune(
            missing, options.learning_rates, options.target, options.tuning_updates, options.out / "tuning"
        )
        replace_json(tuned, best)
    if options.only_tune:
        return
    limits = ["--seconds", str(options.cap), "--to-loss", str(options.target)]
    for seed in options.seeds:
        for rate in options.rates:
            named = [f"{arm}:lr={best[method_of(arm)]:g}" for arm in arms[rate]]
            out = options.out / f"{rate}-seed{seed}"
            compare_behind(rate, named, out, *limits, "--seed", str(seed), *EVALUATION, *SCHEDULE)
    report(options.out, options.rates)


if __name__ == "__main__":
    main()
