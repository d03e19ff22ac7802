"""Arms that ran with the same seeds: how their held-out losses differ, and what it cost them to reach a target loss.

Differences are paired, seed by seed, with 95 % t-intervals, which are not widened for the number of comparisons. The
cost of the target is read where the line between two evaluations crosses it. The target is the worst loss at which a
run of the reference ended, so that all of those reach it; ratios are over the seeds with which an arm reaches it too.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from echoed_run import AXES, costs
from papers.book import Interval, difference, interval
from tuned_arms import Experiment, Run, Runs, final, run_all, tuned

from stretto_lab.observe import replace_json


def compared(experiment: Experiment, made: Runs, name: str) -> dict[str, Any]:
    """Compare a setting's arms on the seeds with which all of them ran.

    Raises:
        KeyError: An arm's tuning is not complete.
    """
    setting = experiment.settings[name]
    tuning = {arm: tuned(setting, name, arm, made.known) for arm in setting.arms}
    rates = {arm: next(iter(losses)) for arm, losses in tuning.items()}
    seeds = made.seeds(name, rates)
    runs = {arm: [made.known(Run(name, arm, rate, seed)) for seed in seeds] for arm, rate in rates.items()}
    main = experiment.reference
    target = max(final(run) for run in runs[main])
    paths = {
        arm: [
            costs(run, experiment.arm(setting, arm, run["seed"]), setting.model, setting.batch)
            for run in found
        ]
        for arm, found in runs.items()
    }
    arrivals = {
        arm: [reached(run, path, target) for run, path in zip(runs[arm], paths[arm], strict=True)]
        for arm in setting.arms
    }
    return {
        "seeds": seeds,
        "target": target,
        "reference": main,
        "model": asdict(setting.model),
        "arms": {
            arm: {
                "lr": rates[arm],
                "tuning": {f"{rate:g}": loss for rate, loss in sorted(tuning[arm].items())},
                "heldout_loss": interval([final(run) for run in runs[arm]]),
                "accuracy": interval(_accuracies(runs[arm])) if _accuracies(runs[arm]) else None,
                "against": {
                    title: _against(runs[arm], runs[other])
                    for title, other in experiment.references(arm).items() if other in runs and other != arm
                },
                "at_end": {axis: statistics.median(path[-1][axis] for path in paths[arm]) for axis in AXES},
                "to_target": _costs_to_target(arrivals[arm], arrivals[main]),
            }
            for arm in setting.arms
        },
    }  # fmt: skip


def _accuracies(runs: list[dict[str, Any]]) -> list[float]:
    return [run["curve"][-1]["accuracy"] for run in runs if "accuracy" in run["curve"][-1]]


def _against(own: list[dict[str, Any]], other: list[dict[str, Any]]) -> dict[str, Interval]:
    found = {"heldout_loss": difference([final(run) for run in own], [final(run) for run in other])}
    if _accuracies(own):
        found["accuracy"] = difference(_accuracies(own), _accuracies(other))
    return found


def reached(run: dict[str, Any], path: list[dict[str, float]], target: float) -> dict[str, float] | None:
    """Return what a run had cost when the line between two evaluations crossed `target`; None if it never did."""
    before: dict[str, float] | None = None
    for point in run["curve"]:
        if point["heldout_loss"] <= target:
            use = float(point["use"])
            if before is not None:
                share = (before["heldout_loss"] - target) / (before["heldout_loss"] - point["heldout_loss"])
                use = before["use"] + share * (point["use"] - before["use"])
            return path[math.ceil(use) - 1]
        before = point
    return None


def _costs_to_target(
    own: list[dict[str, float] | None], other: list[dict[str, float] | None]
) -> dict[str, Any]:
    """Return how many runs reached the target, and what that cost on each axis: median, and ratio to the reference.

    Ratios are paired and their mean is geometric; median and ratio are over the runs that reached the target.
    """
    pairs = [(a, b) for a, b in zip(own, other, strict=True) if a is not None and b is not None]
    axes = {}
    for axis in AXES if pairs else ():
        logarithms = interval([math.log(a[axis] / b[axis]) for a, b in pairs])
        ratio = {name: math.exp(value) for name, value in logarithms.items()} if len(pairs) > 1 else None
        axes[axis] = {"median": statistics.median(a[axis] for a, _ in pairs), "ratio": ratio}
    return {"runs": len(pairs), **axes}


def tables(found: dict[str, Any]) -> str:
    """Return a setting's tables."""
    arms, seeds = found["arms"], found["seeds"]
    titles = list(max((row["against"] for row in arms.values()), key=len))
    lines = [f"Held-out loss at the end, nats; seeds {', '.join(map(str, seeds))}.", "",
             *_head(["arm", "rate", "loss", *(f"against {title}" for title in titles), "accuracy"])]  # fmt: skip
    for arm, row in arms.items():
        differences = [_signed(row["against"].get(title)) for title in titles]
        accuracy = "" if row["accuracy"] is None else f"{row['accuracy']['mean']:.1%}"
        lines.append(
            _row(f"`{arm}`", f"{row['lr']:g}", f"{row['heldout_loss']['mean']:.4f}", *differences, accuracy)
        )
    lines += ["", f"To a held-out loss of {found['target']:.4f}, in multiples of what `{found['reference']}` took.", "",
              *_head(["arm", "reached it", *(axis.replace("_", " ") for axis in AXES)])]  # fmt: skip
    for arm, row in arms.items():
        taken = row["to_target"]
        ratios = [_multiple(taken.get(axis)) for axis in AXES]
        lines.append(_row(f"`{arm}`", f"{taken['runs']} of {len(seeds)}", *ratios))
    lines += ["", "At the end, medians.", "", *_head(["arm", *(axis.replace("_", " ") for axis in AXES)])]
    for arm, row in arms.items():
        lines.append(_row(f"`{arm}`", *(_amount(row["at_end"][axis]) for axis in AXES)))
    return "\n".join(lines) + "\n"


def _head(titles: list[str]) -> list[str]:
    return [_row(*titles), "|" + "---|" * len(titles)]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _signed(found: dict[str, Interval] | None) -> str:
    if found is None:
        return ""
    loss = found["heldout_loss"]
    return f"{loss['mean']:+.4f} ({loss['low']:+.4f} to {loss['high']:+.4f})"


def _multiple(found: dict[str, Any] | None) -> str:
    if found is None or found["ratio"] is None:
        return ""
    ratio = found["ratio"]
    if ratio["low"] == ratio["high"]:
        return f"{ratio['mean']:.2f}"
    return f"{ratio['mean']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def summarise(experiment: Experiment, made: Runs, settings: Sequence[str], folder: Path) -> None:
    """Write the comparison of settings that have been run, and print their tables."""
    try:
        found = {name: compared(experiment, made, name) for name in settings}
    except KeyError as missing:
        raise SystemExit(f"not made yet, `run` it first or leave its setting out: {missing}") from None
    replace_json(folder / experiment.results, found)
    for name, setting in found.items():
        print(f"\n## {name}\n\n{tables(setting)}")


def arguments(
    experiment: Experiment, description: str | None, *, others: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """Return the parser of a script's command line; `others` are further actions that the script has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("run", "summarise", *others))
    parser.add_argument("--out", type=Path, required=True, help="folder for runs and results")
    settings = list(experiment.settings)
    parser.add_argument("--settings", nargs="+", choices=settings, default=settings)
    parser.add_argument("--seeds", type=int, default=5, help="paired seeds, at least 2")
    return parser


def perform(experiment: Experiment, options: argparse.Namespace) -> None:
    """Make the runs that are missing, or compare those that were made."""
    torch.set_num_threads(1)
    runs = Runs(experiment, options.out)
    if options.action == "run":
        run_all(experiment, runs, options.settings, options.seeds)
    else:
        summarise(experiment, runs, options.settings, options.out)
