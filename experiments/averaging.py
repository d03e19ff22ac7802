"""What does averaging replicas now and then cost in loss, and what does it save, where batches are echoed? Equal loads.

    nice python experiments/averaging.py run --out benchmarks/results/DATE-averaging
    python experiments/averaging.py summarise --out benchmarks/results/DATE-averaging
    python experiments/averaging.py real --settings half --out benchmarks/results/DATE-averaging

Two ranks. All arms take the same fresh batches; all but `unechoed` use them again by one and the same coin, which loads
with probability p at every step:

    ddp         gradients summed at every step
    accumulate  `ddp` with 1 / p uses per update
    interval    replicas step alone and are averaged at every (1 / p)-th step
    coin        the same by a coin of probability p, so as often as a fresh batch comes: Algorithm 2
    coin+state  and the optimizer's moments are averaged too
    unechoed    `ddp`, every batch once: as many exchanges as `accumulate`, without echo

`run` trains on a virtual cluster. How arms are tuned is said in tuned_arms.py, what is compared in
paired_comparison.py, and the model of time in echoed_run.py. `real` checks that model: it trains every arm once on two
workers, with a loader that waits and a throttled link, and wants an idle machine.
"""

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echoed_run import Arm
from paired_comparison import arguments, perform
from tuned_arms import Experiment, Setting

from stretto.echo.text import parse_plan
from stretto.recipes import DigitsResNet, StdlibGPT
from stretto.train.arms import parse_arm
from stretto.train.configuration import RunConfig
from stretto.train.launch import LocalRanks, train
from stretto.train.outcome import describe_environment

ARMS = ("ddp", "accumulate", "interval", "coin", "coin+state", "unechoed")
SETTINGS = {
    "half": Setting(
        config=lambda lr: DigitsResNet(width=8, batch=64, lr=lr),
        batch=64, loads=80, uses=2, step_seconds=0.007, rates=(0.1, 0.2, 0.4), arms=ARMS,
        tuning_seeds=(100, 101, 102, 103),
    ),
    "quarter": Setting(
        config=lambda lr: DigitsResNet(width=8, batch=64, lr=lr),
        batch=64, loads=80, uses=4, step_seconds=0.007, rates=(0.05, 0.1, 0.2), arms=ARMS,
        tuning_seeds=(100, 101, 102, 103),
    ),
    "language": Setting(
        config=lambda lr: StdlibGPT(layers=2, width=64, heads=4, context=64, batch=8, lr=lr),
        batch=8, loads=150, uses=2, step_seconds=0.010, rates=(0.004, 0.008, 0.016), arms=ARMS,
        tuning_seeds=(100, 101),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Words:
    """An arm as the command line would have it."""

    echo: str
    strategy: str
    micro_batches: int
    """Uses per update."""


def words(setting: Setting, name: str, seed: int) -> Words:
    """Return an arm in words."""
    rate = f"rate={1 / setting.uses:g}"
    coin = f"local:{rate}:plan=bernoulli:seed={seed}"
    stream = f"bernoulli:p={1 / setting.uses:g}"
    found = {
        "ddp": Words(stream, "ddp", 1),
        "accumulate": Words(stream, "ddp", round(setting.uses)),
        "interval": Words(stream, f"local:{rate}", 1),
        "coin": Words(stream, coin, 1),
        "coin+state": Words(stream, f"{coin}:state=on", 1),
        "unechoed": Words("even:uses=1", "ddp", 1),
    }
    return found[name]


def arm(setting: Setting, name: str, seed: int) -> Arm:
    """Return what an arm does."""
    said = words(setting, name, seed)
    return Arm(plan=parse_plan(said.echo), loads=setting.loads, strategy=parse_arm(said.strategy).strategy(),
               micro_batches=said.micro_batches)  # fmt: skip


def references(name: str) -> dict[str, str]:
    """Return what an arm is compared with: an exchange at every step, and no echo."""
    return {f"`{other}`": other for other in ("ddp", "unechoed") if other != name}


EXPERIMENT = Experiment(
    settings=SETTINGS, arm=arm, reference="ddp", references=references, results="averaging.json"
)


def real(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train every arm of a setting in turn on two workers; return what each took, seed by seed."""
    setting = SETTINGS[name]
    slow_loader = options.slow_loader or f"{1000 * setting.model.load_seconds:g}"
    ranks = LocalRanks(2)
    found = []
    for seed in range(options.seeds):
        for each in setting.arms:
            said = words(setting, each, seed)
            run = RunConfig(
                task=setting.config(setting.rates[0]), seed=seed, strategy=said.strategy, echo=said.echo,
                micro_batches=said.micro_batches, updates=arm(setting, each, seed).uses(seed) // said.micro_batches,
                link=options.link, slow_loader=slow_loader, evaluate_every=None, checkpoint_every=None,
            )  # fmt: skip
            outcome = train(ranks, run, shows_progress=False)
            found.append({
                "setting": name, "slow_loader": slow_loader, "arm": each, "seed": seed, "updates": outcome.updates,
                "fresh": outcome.fresh_batches, "echoed": outcome.echoed_batches,
                "seconds": outcome.training_seconds, "waited": outcome.wait_seconds,
                "exposed": outcome.exposed_seconds, "megabytes": outcome.sent_bytes / 1e6,
            })  # fmt: skip
            took = ", ".join(
                f"{key} {found[-1][key]:.2f}" for key in ("seconds", "waited", "exposed", "megabytes")
            )
            print(f"{name} {each:10} seed {seed}: {took}", flush=True)
    return found


def check_on_workers(options: argparse.Namespace) -> None:
    """Write real.json: every setting on two workers."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    Path(options.out).mkdir(parents=True, exist_ok=True)
    report = {
        "link": options.link,
        "environment": describe_environment(),
        "runs": [run for name in options.settings for run in real(name, options)],
    }
    Path(options.out, "real.json").write_text(json.dumps(report, indent=1) + "\n")


def main() -> None:
    """Run, summarise, or check the model of time on real workers."""
    parser = arguments(EXPERIMENT, __doc__, others=("real",))
    parser.add_argument("--link", default="100mbit", help="of `real`: the slow link")
    parser.add_argument("--slow-loader", help="of `real`: milliseconds of a load; the model's by default")
    options = parser.parse_args()
    if options.action == "real":
        check_on_workers(options)
    else:
        perform(EXPERIMENT, options)


if __name__ == "__main__":
    main()
