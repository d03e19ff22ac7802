"""Time to a fixed held-out loss over slow sockets, the learning rate tuned for every way of updating.

    python benchmarks/time_to_loss.py --out benchmarks/results/DATE-time-to-loss

Needs root for the namespaces. Tuning runs without a slow link, because with fixed counts the updates do not depend on
it. All synchronous arms, ours and the stock ones, make the same updates and share one tuned rate. The measured runs
then stop at the target; time spent on evaluations does not count.
"""

import argparse
import json
import statistics
from pathlib import Path

from namespaces import compare_behind

from stretto.observe import replace_json

TUNED = ("ddp", "acco:wire=int8")
"""One arm per way of updating; arms that differ in wire or clock take its rate."""
STOCK = ("torch-ddp", "torch-ddp-bf16", "torch-ddp-zero", "torch-fsdp2")
OWN = (
    "zero1:wire=bf16",
    "zero1:wire=int8",
    "acco:wire=bf16",
    "acco:wire=int8",
    "acco:wire=int8:clock=2,32",
)
EVALUATION = ["--evaluate-every", "4", "--task.evaluation-windows", "32"]
# A run that only time ends keeps its learning rate. Those of the tuning, which a count may end, must keep theirs too.
SCHEDULE = ["--task.schedule.warmup", "10", "--task.schedule.floor", "1"]


def updates_to_target(run: dict) -> float:
    """Return the updates that a run needed to reach the target, or infinity."""
    return float("inf") if run["seconds_to_loss"] is None else run["updates"]


def tune(rates: list[float], target: float, updates: int, out: Path) -> dict[str, float]:
    """Return the rate at which each tuned arm needs the fewest updates; ties go to the lower final loss."""
    arms = [f"{arm}:lr={rate:g}" for arm in TUNED for rate in rates]
    limits = ["--updates", str(updates), "--to-loss", str(target), "--seed", "1000"]
    runs = compare_behind("none", arms, out, *limits, *EVALUATION, *SCHEDULE)["runs"]
    best = {}
    for arm in TUNED:
        candidates = [run for run in runs if run["strategy"].startswith(f"{arm}:lr=")]
        chosen = min(candidates, key=lambda run: (updates_to_target(run), run["heldout_loss"]))
        best[method_of(arm)] = chosen["learning_rate"]
        for run in candidates:
            print(
                f"{run['strategy']:28} {updates_to_target(run):5g} updates, {run['heldout_loss']:.4f}",
                flush=True,
            )
    return best


def method_of(arm: str) -> str:
    """Return the key of an arm's tuned rate: all synchronous arms make the same updates."""
    name = arm.partition(":")[0]
    return name if name == "acco" else "synchronous"


def report(out: Path, rate: str) -> None:
    """Print every arm's time to the target, over all repeats measured so far."""
    runs = [
        run
        for path in sorted(out.glob(f"{rate}-seed*/compare.json"))
        for run in json.loads(path.read_text())["runs"]
    ]
    for arm in dict.fromkeys(run["strategy"] for run in runs):
        found = [run["seconds_to_loss"] for run in runs if run["strategy"] == arm]
        reached = [seconds for seconds in found if seconds is not None]
        told = f"reached {len(reached)} of {len(found)}"
        if reached:
            told += f", {statistics.median(reached):6.1f} s ({min(reached):.1f} to {max(reached):.1f})"
        print(f"{arm:40} {told}")


def main() -> None:
    """Tune, measure, print the ranking."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--target", type=float, default=2.75, help="held-out loss, nats per byte")
    parser.add_argument("--cap", type=float, default=75.0, help="training seconds after which a run gives up")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="one repeat each, in turns")
    parser.add_argument("--rates", type=float, nargs="+", default=[7e-4, 1e-3, 1.5e-3])
    parser.add_argument("--tuning-updates", type=int, default=90)
    parser.add_argument("--arms", nargs="+", default=[*STOCK, *OWN])
    parser.add_argument("--only-tune", action="store_true", help="end before the measured runs")
    options = parser.parse_args()
    tuned = options.out / "tuned.json"
    if not tuned.exists():  # tuning does not depend on time, so it may have been done before, elsewhere
        found = tune(options.rates, options.target, options.tuning_updates, options.out / "tuning")
        replace_json(tuned, found)
    if options.only_tune:
        return
    best = json.loads(tuned.read_text())
    arms = [f"{arm}:lr={best[method_of(arm)]:g}" for arm in options.arms]
    limits = ["--seconds", str(options.cap), "--to-loss", str(options.target)]
    for seed in options.seeds:
        out = options.out / f"{options.rate}-seed{seed}"
        compare_behind(options.rate, arms, out, *limits, "--seed", str(seed), *EVALUATION, *SCHEDULE)
    report(options.out, options.rate)


if __name__ == "__main__":
    main()
