"""What does averaging replicas now and then cost in loss, and what does it save? Equal loads, paired seeds.

Two workers train the digits on the same micro-batches in the same order, whatever the arm. `ddp` synchronises at every
update; `accumulate` is `ddp` with INTERVAL times the micro-batches per update, so a share of the updates and of the
bytes; `interval` averages replicas at every INTERVAL-th update, `coin` at the same rate by the paper's coin (Algorithm
2), and `state` as `interval` with the optimizer's moments averaged too. The learning rate is tuned for every arm, on a
seed of its own.

    python experiments/averaging.py --out benchmarks/results/DATE-averaging
"""

import argparse
import json
import os
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from scipy import stats

from stretto.recipes import DigitsResNet
from stretto.train.configuration import RunConfig
from stretto.train.launch import LocalRanks

SYNCHRONOUS = "ddp"
INTERVAL = 4
ARMS = {
    SYNCHRONOUS: ("ddp", 1),
    "accumulate": ("ddp", INTERVAL),
    "interval": (f"local:rate={1 / INTERVAL}", 1),
    "coin": (f"local:rate={1 / INTERVAL}:plan=bernoulli", 1),
    "state": (f"local:rate={1 / INTERVAL}:state=on", 1),
}
"""Strategy, and micro-batches per update in multiples of the synchronous arm's, by arm."""
TUNING_SEED = 1000


@dataclass(frozen=True)
class Setting:
    """What all runs have in common."""

    loads: int
    """Micro-batches of each rank."""
    micro_batches: int
    """Per rank and update of the synchronous arm."""
    batch: int
    width: int
    link: str


def train(ranks: LocalRanks, setting: Setting, arm: str, rate: float, seed: int) -> dict:
    """Train once; return what it took and where it ended."""
    strategy, multiple = ARMS[arm]
    if strategy.startswith("local"):
        strategy += f":seed={seed}"
    micro_batches = setting.micro_batches * multiple
    run = RunConfig(
        task=DigitsResNet(lr=rate, batch=setting.batch, width=setting.width),
        strategy=strategy,
        seed=seed,
        updates=setting.loads // micro_batches,
        micro_batches=micro_batches,
        link=setting.link,
        evaluate_every=None,
        checkpoint_every=None,
    )
    outcome = ranks.train(run, shows_progress=False)
    found = {
        "arm": arm,
        "strategy": strategy,
        "learning_rate": rate,
        "seed": seed,
        "updates": outcome.updates,
        "loads": outcome.updates * micro_batches,
        "heldout_loss": outcome.heldout_loss,
        "accuracy": outcome.accuracy,
        "sent_bytes": outcome.sent_bytes,
        "seconds": outcome.training_seconds,
    }
    print(
        f"{arm:10} lr {rate:<6g} seed {seed:4}: loss {outcome.heldout_loss:.4f}, {outcome.sent_bytes / 1e6:.1f} MB, "
        f"{outcome.training_seconds:.1f} s",
        flush=True,
    )
    return found


def tune(ranks: LocalRanks, setting: Setting, arm: str, rates: list[float]) -> tuple[float, list[dict]]:
    """Return the learning rate at which an arm ends lowest, and the runs that say so."""
    runs = [train(ranks, setting, arm, rate, TUNING_SEED) for rate in rates]
    return min(runs, key=lambda run: run["heldout_loss"])["learning_rate"], runs


def summarise(runs: list[dict], arm: str) -> dict:
    """Return an arm's medians, and its loss against the synchronous arm's with a 95 % t-interval over the seeds."""
    own = [run for run in runs if run["arm"] == arm]
    loss = {(run["arm"], run["seed"]): run["heldout_loss"] for run in runs}
    differences = [loss[arm, run["seed"]] - loss[SYNCHRONOUS, run["seed"]] for run in own]
    mean = statistics.mean(differences)
    spread = statistics.stdev(differences) if len(differences) > 1 else float("nan")
    half = stats.t.ppf(0.975, len(differences) - 1) * spread / len(differences) ** 0.5
    medians = {
        key: statistics.median(run[key] for run in own)
        for key in ("heldout_loss", "accuracy", "sent_bytes", "seconds", "updates")
    }
    known = len(differences) > 1
    return {
        **medians,
        "mean_difference": mean,
        "low": mean - half if known else None,
        "high": mean + half if known else None,
    }


def main() -> None:
    """Tune every arm, run all on all seeds in turns, write `averaging.json` and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for averaging.json")
    parser.add_argument("--loads", type=int, default=1200, help="micro-batches of each worker and run")
    parser.add_argument("--micro-batches", type=int, default=2, help="per worker and synchronous update")
    parser.add_argument("--batch", type=int, default=16, help="images per micro-batch")
    parser.add_argument("--width", type=int, default=16, help="channels of the network's first block")
    parser.add_argument("--link", default="100mbit", help="the slow link")
    parser.add_argument("--seeds", type=int, default=5, help="paired seeds")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.025, 0.05, 0.1, 0.2])
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    options.out.mkdir(parents=True, exist_ok=True)
    setting = Setting(options.loads, options.micro_batches, options.batch, options.width, options.link)
    ranks = LocalRanks(2)
    tuned = {arm: tune(ranks, setting, arm, options.rates) for arm in ARMS}
    runs = [train(ranks, setting, arm, tuned[arm][0], seed) for seed in range(options.seeds) for arm in ARMS]
    summary = {arm: summarise(runs, arm) for arm in ARMS}
    report = {
        "setting": asdict(setting),
        "interval": INTERVAL,
        "learning_rates": {arm: rate for arm, (rate, _) in tuned.items()},
        "summary": summary,
        "runs": runs,
        "tuning": [run for _, found in tuned.values() for run in found],
        "torch": torch.__version__,
    }
    (options.out / "averaging.json").write_text(json.dumps(report, indent=1) + "\n")
    for arm, found in summary.items():
        print(
            f"{arm:10} loss {found['heldout_loss']:.4f} ({found['mean_difference']:+.4f}), accuracy "
            f"{found['accuracy']:.3f}, {found['updates']:.0f} updates, {found['sent_bytes'] / 1e6:.1f} MB, "
            f"{found['seconds']:.1f} s"
        )


if __name__ == "__main__":
    main()
