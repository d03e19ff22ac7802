"""Batches are echoed: what does it cost in loss, and what does it save, to average replicas only now and then?

    nice python experiments/averaging.py run --out benchmarks/results/DATE-averaging
    python experiments/averaging.py summarise --out benchmarks/results/DATE-averaging
    python experiments/averaging.py real --settings half --out benchmarks/results/DATE-averaging

Two ranks. All arms take the same fresh batches. All but `unechoed` use them again: at every step one and the same coin
loads a fresh batch with probability p, or else takes the last one again.

    ddp         gradients are summed at every step
    accumulate  `ddp` with 1 / p micro-batches per update; in the results of 2026-11-21 the uses of a batch could fall
                into one update, which an echo no longer does
    interval    replicas step alone and are averaged at every (1 / p)-th step
    coin        the same, but averaged by a coin of probability p, so as often as a fresh batch comes: Algorithm 2
    coin+state  the same, and the optimizer's moments are averaged too
    unechoed    `ddp` with every batch used once: as many exchanges as `accumulate`, without echo

`run` trains on a virtual cluster: tuned_arms.py tunes the arms, paired_comparison.py compares them, and echoed_run.py
has the model of time. `real` checks that model: it trains every arm once on two workers, with a loader that waits and a
throttled link, and needs an idle machine.
"""

import argparse
import os
from dataclasses import dataclass
from typing import Any

from echoed_run import Arm
from paired_comparison import arguments, perform
from tuned_arms import Experiment, Setting

from stretto.echo.text import parse_plan
from stretto.machine import describe_environment
from stretto_lab.observe import replace_json
from stretto_lab.recipes import DigitsResNet, StdlibGPT
from stretto_lab.train.arms import parse_arm
from stretto_lab.train.configuration import RunConfig
from stretto_lab.train.launch import Ranks, train

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
        config=lambda lr: StdlibGPT(size="2x64x4", context=64, batch=8, lr=lr),
        batch=8, loads=150, uses=2, step_seconds=0.010, rates=(0.004, 0.008, 0.016), arms=ARMS,
        tuning_seeds=(100, 101),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """An arm in the options of the command line."""

    echo: str
    strategy: str
    micro_batches: int
    """Uses per update."""


def options_of(setting: Setting, name: str, seed: int) -> Options:
    """Return the options of an arm."""
    rate = f"rate={1 / setting.uses:g}"
    coin = f"local:{rate}:plan=bernoulli:seed={seed}"
    stream = f"bernoulli:p={1 / setting.uses:g}"
    found = {
        "ddp": Options(stream, "ddp", 1),
        "accumulate": Options(stream, "ddp", round(setting.uses)),
        "interval": Options(stream, f"local:{rate}", 1),
        "coin": Options(stream, coin, 1),
        "coin+state": Options(stream, f"{coin}:state=on", 1),
        "unechoed": Options("even:uses=1", "ddp", 1),
    }
    return found[name]


def arm(setting: Setting, name: str, seed: int) -> Arm:
    """Return what an arm does."""
    chosen = options_of(setting, name, seed)
    return Arm(plan=parse_plan(chosen.echo), loads=setting.loads, strategy=parse_arm(chosen.strategy).strategy(),
               micro_batches=chosen.micro_batches)  # fmt: skip


def references(name: str) -> dict[str, str]:
    """Return what an arm is compared with: the arm that exchanges at every step, and the one without echo."""
    return {f"`{other}`": other for other in ("ddp", "unechoed") if other != name}


EXPERIMENT = Experiment(
    settings=SETTINGS, arm=arm, reference="ddp", references=references, results="averaging.json"
)


def real(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train every arm of a setting in turn on two workers; return what each of them took, seed by seed."""
    setting = SETTINGS[name]
    slow_loader = options.slow_loader or f"{1000 * setting.model.load_seconds:g}"
    ranks = Ranks.local(2)
    found = []
    for seed in range(options.seeds):
        for each in setting.arms:
            chosen = options_of(setting, each, seed)
            run = RunConfig(
                task=setting.config(setting.rates[0]), seed=seed, strategy=chosen.strategy, echo=chosen.echo,
                micro_batches=chosen.micro_batches, updates=arm(setting, each, seed).uses(seed) // chosen.micro_batches,
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
    runs = [run for name in options.settings for run in real(name, options)]
    report = {"link": options.link, "environment": describe_environment(), "runs": runs}
    replace_json(options.out / "real.json", report)


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
