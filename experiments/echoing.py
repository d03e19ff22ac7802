"""What another use of a batch is worth: held-out loss of echoed training, learning rates tuned for every arm.

    nice python experiments/echoing.py run --out benchmarks/results/DATE-echo-learning
    python experiments/echoing.py summarise --out benchmarks/results/DATE-echo-learning

Two ranks of a virtual cluster. All arms but `spaced` take the same fresh batches:

    fresh      every batch once
    spaced     as many steps as the echoed arms, every batch fresh: what re-reading would give
    even       1 / 0.55 = 1.82 uses of every batch
    bernoulli  a fresh batch with p = 0.55
    falling    p from 1 to 0.1 on a cosine: the published schedule; on average 0.55
    rising     the reverse

each with gradients summed at every step (`ddp`), and as `ARM+local` with replicas that step alone and are averaged
at the rate at which the arm loads (Algorithm 2): by the coin under `bernoulli`, `falling` and `rising`, evenly under
`even`. `fresh` and `spaced`, whose rate of loading is 1, are averaged evenly at 0.55 too.

Every arm's learning rate is the best of a grid of factors of two, which grows while its edge is best, on seeds of
their own. A run that is in runs.jsonl already is not repeated, so `run` may be stopped at any time. Seconds are those
of a model (see `timeline`): no result depends on how busy the machine was.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from scipy import stats

from stretto import DDP, Bernoulli, DataParallel, EchoLoader, EchoOptions, Even, LocalSGD
from stretto.echo import Cosine, Plan
from stretto.echo.length import epoch_length
from stretto.errors import NonFinite
from stretto.recipes import DigitsResNet, StdlibGPT, TaskConfig
from stretto.virtual import VirtualCluster, VirtualGroup

RANKS = 2
MEAN_P = 0.55
LOWEST_P = 0.1
PLANS = ("fresh", "spaced", "even", "bernoulli", "falling", "rising")
LOCAL = "+local"
WIDENINGS = 2
"""How often a grid of learning rates grows by one where its edge is best."""
RATIO = 1 / MEAN_P
"""L / C of the modelled loader: what the echoed arms hide exactly, at their mean rate."""
LINK_BITS_PER_SECOND = 1e8
"""Of the modelled link between the two ranks."""
AHEAD = 2
"""Batches that the modelled loader reads ahead."""


@dataclass(frozen=True)
class Setting:
    """What is trained, and for how long."""

    config: Callable[[float], TaskConfig]
    """The recipe at a learning rate."""
    batch: int
    """Samples per rank and step."""
    loads: int
    """Fresh batches of each rank; `spaced` takes more."""
    rates: tuple[float, ...]
    """The grid of learning rates to begin with, rising by factors of two."""
    arms: tuple[str, ...]
    tuning_seeds: tuple[int, ...]
    """Apart from the seeds that are compared."""


_GRID = (*PLANS, *(plan + LOCAL for plan in PLANS))
SETTINGS = {
    "digits-large": Setting(
        lambda lr: DigitsResNet(width=8, batch=128, lr=lr), 128, 56, (0.1, 0.2, 0.4), _GRID, (100, 101),
    ),
    "digits-small": Setting(
        lambda lr: DigitsResNet(width=8, batch=16, lr=lr), 16, 200, (0.04, 0.08, 0.16), _GRID, (100,),
    ),
    "language": Setting(
        lambda lr: StdlibGPT(layers=2, width=64, heads=4, context=64, batch=8, lr=lr), 8, 200,
        (0.004, 0.008, 0.016), ("fresh", "even", "falling"), (100,),
    ),
}  # fmt: skip
POINTS = 10
"""Evaluations along a run."""


@dataclass(frozen=True)
class Run:
    """One run."""

    setting: str
    arm: str
    lr: float
    seed: int


def plan_of(arm: str, loads: int) -> tuple[Plan, int]:
    """Return an arm's plan and its number of fresh batches on each rank."""
    steps = round(loads / MEAN_P)
    plans: dict[str, tuple[Plan, int]] = {
        "fresh": (Even(1), loads),
        "spaced": (Even(1), steps),
        "even": (Even(1 / MEAN_P), loads),
        "bernoulli": (Bernoulli(MEAN_P), loads),
        "falling": (Bernoulli(Cosine(1.0, LOWEST_P, steps)), loads),
        "rising": (Bernoulli(Cosine(LOWEST_P, 1.0, steps)), loads),
    }
    return plans[arm.removesuffix(LOCAL)]


def strategy_of(arm: str, plan: Plan, seed: int) -> DDP | LocalSGD:
    """Return an arm's strategy: averages at the rate at which the plan loads, or at 0.55 where it always does."""
    if not arm.endswith(LOCAL):
        return DDP()
    if isinstance(plan, Bernoulli):
        return LocalSGD(rate=plan.p, plan="bernoulli", seed=seed)
    return LocalSGD(rate=MEAN_P, plan="even")


def train(run: Run) -> dict[str, Any]:
    """Train once; return the run's fields, its curve, and what was loaded and averaged when."""
    started = time.process_time()
    results = VirtualCluster(RANKS, seed=run.seed).run(lambda rank, group: _rank(run, rank, group))
    first = results.values[0]
    spent = time.process_time() - started - sum(value.pop("evaluation_seconds") for value in results.values)
    return {**asdict(run), **first, "cpu_seconds_per_step": spent / RANKS / max(1, first["steps"])}


def _rank(run: Run, rank: int, group: VirtualGroup) -> dict[str, Any]:
    """One rank's run."""
    setting = SETTINGS[run.setting]
    plan, loads = plan_of(run.arm, setting.loads)
    steps = epoch_length(plan.chooser(run.seed), loads, 0)
    task = setting.config(run.lr).build(rank, RANKS, run.seed, steps)
    task.loader.micro_batches = loads * RANKS
    # On the training thread: a virtual cluster has no other time than its own.
    loader = EchoLoader(task.loader, plan, options=EchoOptions(seed=run.seed, ahead=0))
    strategy = strategy_of(run.arm, plan, run.seed)
    parallel = DataParallel(task.model, task.optimizer, strategy, micro_batches=1, group=group)
    curve: list[dict[str, float]] = []
    fresh, averaged = "", ""
    evaluating = 0.0
    for batch in parallel.feed(loader):
        fresh += "1" if loader.is_fresh else "0"
        loss = task.loss(task.model, batch)
        update = parallel.backward(loss.value, loss.weight, loss.samples)
        task.scheduler.step()
        averaged += "1" if update.gap == 0 else "0"
        if update.step * POINTS // steps > (update.step - 1) * POINTS // steps:
            before = time.process_time()
            with parallel.settled():
                curve.append(_measured(task, update.step) if rank == 0 else {})
            evaluating += time.process_time() - before
        if update.step == steps:
            break
    parallel.finish()
    return {"steps": steps, "fresh": fresh, "averaged": averaged, "curve": curve,
            "parameters": sum(parameter.numel() for parameter in task.model.parameters()),
            "evaluation_seconds": evaluating if rank == 0 else 0.0}  # fmt: skip


def _measured(task: Any, step: int) -> dict[str, float]:
    accuracy = {} if task.accuracy is None else {"accuracy": task.accuracy(task.model)}
    return {"step": step, "heldout_loss": task.evaluate(task.model), **accuracy}


class Book:
    """The runs that were made, one line each."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "runs.jsonl"
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self.runs = [json.loads(line) for line in lines]

    def result(self, run: Run) -> dict[str, Any]:
        """Return what came of `run`, making it where it has not been made."""
        for known in self.runs:
            if all(known[name] == value for name, value in asdict(run).items()):
                return known
        try:
            found = train(run)
        except NonFinite:
            found = {**asdict(run), "curve": []}
        self.runs.append(found)
        with self._path.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(f"{run.setting} {run.arm:15} lr {run.lr:.3g} seed {run.seed:3}: {final(found):.4f}, "
              f"{found.get('cpu_seconds_per_step', math.nan) * 1000:.1f} ms per rank and step", flush=True)  # fmt: skip
        return found


def final(run: dict[str, Any]) -> float:
    """Return the held-out loss at the end, in nats; infinite for a run that diverged."""
    loss = run["curve"][-1]["heldout_loss"] if run["curve"] else math.inf
    return loss if math.isfinite(loss) else math.inf


def tuned(book: Book, setting: str, arm: str) -> float:
    """Return the learning rate at which an arm ends lowest."""

    def mean(rate: float) -> float:
        return statistics.mean(
            final(book.result(Run(setting, arm, rate, seed))) for seed in SETTINGS[setting].tuning_seeds
        )

    losses = {rate: mean(rate) for rate in SETTINGS[setting].rates}
    for _ in range(WIDENINGS):
        best = min(losses, key=losses.__getitem__)
        if best not in (min(losses), max(losses)):
            break
        wider = best * 2 if best == max(losses) else best / 2
        losses[wider] = mean(wider)
    return min(losses, key=losses.__getitem__)


def run_all(book: Book, settings: Sequence[str], seeds: int) -> None:
    """Tune all arms, then compare them, all arms of a seed after each other."""
    rates = {(name, arm): tuned(book, name, arm) for name in settings for arm in SETTINGS[name].arms}
    for seed in range(seeds):
        for (name, arm), rate in rates.items():
            book.result(Run(name, arm, rate, seed))


def timeline(fresh: str, averaged: str, step: float, load: float, exchange: float) -> list[float]:
    """Return the modelled second at which every step ends.

    A loader reads one batch after the other, `AHEAD` of the steps at most; a step that wants a fresh one waits for it;
    an exchange hides behind nothing:

        read(k) = max(read(k - 1), taken(k - AHEAD)) + load
        end(t)  = max(end(t - 1), read(k) if a fresh batch is taken) + step + (exchange if one is made)

    Args:
        fresh: Whether a step takes a fresh batch, "1" or "0" each.
        averaged: Whether it ends with an exchange.
        step: Seconds of a rank's own work in a step.
        load: Seconds of a read.
        exchange: Seconds of an exchange.
    """
    now, read = 0.0, 0.0
    taken: list[float] = []
    ends = []
    for is_fresh, is_averaged in zip(fresh, averaged, strict=True):
        if is_fresh == "1":
            read = max(read, taken[-AHEAD] if len(taken) >= AHEAD else 0.0) + load
            now = max(now, read)
            taken.append(now)
        now += step + (exchange if is_averaged == "1" else 0.0)
        ends.append(now)
    return ends


def with_axes(run: dict[str, Any], step_seconds: float) -> list[dict[str, float]]:
    """Return a run's curve with fresh samples, seconds and bytes beside the steps."""
    setting = SETTINGS[run["setting"]]
    # In an all-reduce over two ranks each one sends as many bytes as it has.
    exchange_bytes = 4 * run["parameters"]
    seconds = timeline(run["fresh"], run["averaged"], step_seconds, RATIO * step_seconds,
                       8 * exchange_bytes / LINK_BITS_PER_SECOND)  # fmt: skip
    return [
        {**point,
         "fresh_samples": run["fresh"][: point["step"]].count("1") * setting.batch * RANKS,
         "seconds": seconds[point["step"] - 1],
         "megabytes": run["averaged"][: point["step"]].count("1") * exchange_bytes / 1e6}
        for point in run["curve"]
    ]  # fmt: skip


AXES = ("step", "fresh_samples", "seconds", "megabytes")


def interval(values: Sequence[float]) -> dict[str, float]:
    """Return the mean and its 95 % t-interval."""
    mean = statistics.mean(values)
    half = float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return {"mean": mean, "low": mean - half, "high": mean + half}


def compared(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what came of one setting's arms: on the seeds that all arms have."""
    setting = SETTINGS[runs[0]["setting"]]
    step_seconds = statistics.median(run["cpu_seconds_per_step"] for run in runs if run["curve"])
    chosen = [run for run in runs if run["seed"] not in setting.tuning_seeds]
    by_arm = {arm: {run["seed"]: run for run in chosen if run["arm"] == arm} for arm in setting.arms}
    seeds = sorted(set.intersection(*(set(found) for found in by_arm.values())))
    if len(seeds) < 2:
        return {"seeds": seeds}
    curves = {arm: [with_axes(found[seed], step_seconds) for seed in seeds] for arm, found in by_arm.items()}
    losses = {arm: [final(found[seed]) for seed in seeds] for arm, found in by_arm.items()}
    target = statistics.mean(losses[PLANS[0]])
    return {
        "seeds": seeds,
        "step_seconds": step_seconds,
        "target": target,
        "arms": {
            arm: {
                "lr": by_arm[arm][seeds[0]]["lr"],
                "heldout_loss": interval(losses[arm]),
                "against_fresh": _difference(losses[arm], losses["fresh"]),
                "against_spaced": _difference(losses[arm], losses["spaced"]) if "spaced" in losses else None,
                "accuracy": statistics.mean(c[-1].get("accuracy", math.nan) for c in curves[arm]),
                "at_end": {axis: statistics.median(c[-1][axis] for c in curves[arm]) for axis in AXES},
                "to_target": _reached(curves[arm], target),
            }
            for arm in setting.arms
        },
    }


def _difference(own: list[float], other: list[float]) -> dict[str, float]:
    return interval([a - b for a, b in zip(own, other, strict=True)])


def _reached(curves: list[list[dict[str, float]]], target: float) -> dict[str, float]:
    """Return in how many runs the held-out loss came down to `target`, and the median of what that had taken."""
    first = [next((point for point in curve if point["heldout_loss"] <= target), None) for curve in curves]
    reached = [point for point in first if point is not None]
    medians = {axis: statistics.median(point[axis] for point in reached) for axis in AXES} if reached else {}
    return {"runs": len(reached), **medians}


def summarise(book: Book, folder: Path) -> None:
    """Write echoing.json and print one table for every setting."""
    found = {
        name: compared(runs)
        for name in SETTINGS
        if (runs := [run for run in book.runs if run["setting"] == name])
    }
    (folder / "echoing.json").write_text(json.dumps(found, indent=1) + "\n")
    for name, setting in found.items():
        print(f"\n{name}: seeds {setting['seeds']}")
        for arm, row in setting.get("arms", {}).items():
            difference, end = row["against_fresh"], row["at_end"]
            print(f"| `{arm}` | {row['lr']:g} | {row['heldout_loss']['mean']:.4f} | {difference['mean']:+.4f} "
                  f"({difference['low']:+.4f} to {difference['high']:+.4f}) | {row['accuracy']:.1%} | "
                  f"{end['step']:.0f} | {end['fresh_samples']:.0f} | {end['seconds']:.2f} | {end['megabytes']:.1f} | "
                  f"{row['to_target']['runs']} |")  # fmt: skip


def main() -> None:
    """Run what has not been run yet, or say what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("run", "summarise"))
    parser.add_argument("--out", type=Path, required=True, help="folder for runs.jsonl and echoing.json")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=5, help="paired seeds, at least 2")
    options = parser.parse_args()
    torch.set_num_threads(1)
    book = Book(options.out)
    if options.action == "run":
        run_all(book, options.settings, options.seeds)
    else:
        summarise(book, options.out)


if __name__ == "__main__":
    main()
