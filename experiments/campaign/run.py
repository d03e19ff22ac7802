"""Thousands of small jobs, each with a fault of its own: do guards keep what docs/guards.md promises?

    python -m experiments.campaign --faults 2000 --out runs/campaign
    python -m experiments.campaign --faults 2000 --only 137

`--only` repeats one fault and shows what every rank saw. Each fault strikes one job with guards and one without, on
virtual ranks; both are compared with their golden run, the same job without the fault. Clean jobs have guards and no
fault: every incident there is a false alarm. README.md says how to read the table.
"""

import argparse
import functools
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from experiments.campaign.drawing import DrawnFault, draw_faults, kinds_of_jobs
from experiments.campaign.judgement import Judgement, judge, site_rows
from experiments.campaign.trial import GoldenRuns, Trial, golden_runs, run_virtual
from stretto.machine import describe_environment
from stretto_lab.recipes import StdlibGPT, TaskConfig

CLEAN_ROUNDS_PER_FAULT = 10
CLEAN_UPDATES = 50
"""Of one clean job: making a job costs as much as some updates."""
Given = TypeVar("Given")
Found = TypeVar("Found")


def small() -> TaskConfig:
    """Return a task whose job of three ranks takes a tenth of a second.

    Every rank's share of a bucket still fills more than one row of sums (32 KiB), so that there can be damage that is
    too large to be repaired.
    """
    return StdlibGPT(
        size="1x64x1",
        context=8,
        batch=1,
        evaluation_windows=4,
        data=replace(StdlibGPT().data, megabytes=0.1),
    )


def strike(given: tuple[DrawnFault, GoldenRuns]) -> Judgement:
    """Run both jobs of a fault, and judge it."""
    drawn, golden = given
    guarded, unguarded = (run_virtual(one.struck_by(drawn)) for one in (golden.guarded, golden.unguarded))
    return judge(drawn, guarded, unguarded, golden.guarded)


def clean_jobs(task: TaskConfig, seed: int, rounds: int) -> Iterator[Trial]:
    """Yield guarded jobs of every kind in turn, each with a seed of its own, until they have so many exchanges."""
    for number, job in enumerate(itertools.cycle(kinds_of_jobs())):
        if rounds <= 0:
            return
        each = Trial(task=task, job=job, is_guarded=True, seed=0).rounds_per_update
        updates = min(CLEAN_UPDATES, -(-rounds // each))
        rounds -= updates * each
        yield Trial(
            task=task, job=job, is_guarded=True, seed=seed + 1 + number, updates=updates, micro_batches=each
        )


def alarms_of(trial: Trial) -> list[str]:
    """Return the incidents and errors of a job without a fault: all of them are false."""
    results = run_virtual(trial)
    found = [str(incident) for result in results for incident in result.incidents]
    found += [result.error for result in results if result.error is not None]
    return [f"{trial.job}, seed {trial.seed}: {text}" for text in dict.fromkeys(found)]


def campaign(
    task: TaskConfig, faults: int, seed: int = 0, *, workers: int = 1, clean_rounds: int | None = None
) -> tuple[list[Judgement], list[str]]:
    """Return the judgement of every fault, and the false alarms of clean jobs."""

    def each(function: Callable[[Given], Found], jobs: Sequence[Given], what: str) -> list[Found]:
        print(f"{len(jobs)} {what}", file=sys.stderr, flush=True)
        with ProcessPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as processes:
            return list(processes.map(function, jobs))

    drawn = list(itertools.islice(draw_faults(seed), faults))
    kinds = list(dict.fromkeys(one.job for one in drawn))
    make = functools.partial(golden_runs, task, seed=seed)
    golden = dict(zip(kinds, each(make, kinds, "kinds of jobs without a fault"), strict=True))
    rounds = faults * CLEAN_ROUNDS_PER_FAULT if clean_rounds is None else clean_rounds
    alarms = each(alarms_of, list(clean_jobs(task, seed, rounds)), "clean jobs")
    judgements = each(strike, [(one, golden[one.job]) for one in drawn], "faults")
    return judgements, list(itertools.chain.from_iterable(alarms))


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Print a row for each kind of damage, those that a guard watches for first."""
    columns = ("applied", "harmful", "detected", "named", "identical", "error")
    print(f"{'':48}" + "".join(f"{name:>10}" for name in columns))
    for row in sorted(rows, key=lambda row: (row["guard"] is None, row["guard"])):
        words = [
            row["site"],
            row["extent"],
            row["strategies"],
            "repeated" if row["lasts"] else "",
            row["guard"],
        ]
        print(
            f"{', '.join(word for word in words if word):48}" + "".join(f"{row[name]:10}" for name in columns)
        )


def main(words: Sequence[str] | None = None) -> int:
    """Run a campaign, and return 1 where a promise was broken or an alarm was false."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.campaign", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--faults", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="processes that share the jobs")
    parser.add_argument("--only", type=int, help="number of the one fault to repeat; nothing is written")
    parser.add_argument("--out", type=Path, default=Path("runs/campaign"))
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    if options.only is not None:
        drawn = next(itertools.islice(draw_faults(options.seed), options.only, None))
        judgement = strike((drawn, golden_runs(small(), drawn.job, options.seed)))
        print(f"{drawn.fault} in {drawn.job}, promised: {drawn.promise.summary}")
        print(f"unguarded: {judgement.harm}; guarded: {judgement.story}")
        return int(judgement.violation is not None)
    started = time.perf_counter()
    judgements, alarms = campaign(small(), options.faults, options.seed, workers=options.workers)
    rows = site_rows(judgements)
    broken = [one for one in judgements if one.violation is not None]
    print_table(rows)
    print(f"{sum(one.is_applied for one in judgements)} of {options.faults} faults changed bits")
    for one in broken:
        print(f"broken promise: fault {one.drawn.number}: {one.story}")
    print("\n".join(f"false alarm: {alarm}" for alarm in alarms), end="")
    options.out.mkdir(parents=True, exist_ok=True)
    report = {
        "faults": options.faults,
        "seed": options.seed,
        "sites": rows,
        "broken": [{"number": one.drawn.number, "story": one.story} for one in broken],
        "alarms": alarms,
        "seconds": time.perf_counter() - started,
        "environment": describe_environment(),
    }
    (options.out / "campaign.json").write_text(json.dumps(report, indent=1))
    return int(bool(broken or alarms))


if __name__ == "__main__":
    sys.exit(main())
