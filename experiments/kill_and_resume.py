"""A run is killed at any moment and resumed: does it end, to the bit, as the run that nobody disturbed?

A run is started from the command line; a random fraction of an update after a random update, a random worker is killed
with SIGKILL; the same command with `--resume` goes on. Records, evaluations and model must equal those of an
undisturbed run of the same strategy to the bit. Only what a rank measured (times, bytes sent) may differ. Linux only:
the workers are found in /proc.

    python experiments/kill_and_resume.py --moments 20 --out benchmarks/results/DATE-kill-and-resume
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from stretto.observe import read_json_lines, replace_json
from stretto.train.outcome import describe_environment

STRATEGIES = ("acco", "wp", "dpu", "zero1", "ddp")
UPDATES = 24
WORKERS = 2
OWN = {"seconds", "lane_seconds", "exposed_seconds", "training_seconds", "sent_bytes"}
"""Fields of a record in which two equal runs may differ: what a rank measured."""
POLL_SECONDS = 0.005


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Which worker of a run is killed, and when."""

    strategy: str
    victim: int
    """Rank."""
    update: int
    """The kill comes after this update's record; 0 is while the run starts."""
    fraction: float
    """And this share of an update's time later, its evaluation and checkpoint included."""


def draw(seed: int, count: int) -> list[Moment]:
    """Draw moments, the strategies in turn."""
    generator = random.Random(seed)
    return [
        Moment(
            strategy=STRATEGIES[index % len(STRATEGIES)],
            victim=generator.randrange(WORKERS),
            update=generator.randrange(UPDATES),
            fraction=round(generator.random(), 3),
        )
        for index in range(count)
    ]


def command(recipe: list[str], folder: Path, strategy: str, *more: str) -> list[str]:
    """Return the command of a run that evaluates and saves often."""
    return [
        sys.executable, "-m", "stretto", "train", *recipe, "--strategy", strategy,
        "--updates", str(UPDATES), "--workers", str(WORKERS), "--checkpoint-every", "3",
        "--evaluate-every", "4", "--run-dir", str(folder), "--no-tensorboard", *more,
    ]  # fmt: skip


def workers_of(launcher: int) -> list[int]:
    """Return the process ids of a launcher's workers in rank order: the children of its fork server."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in brackets may hold anything; the parent is the second word behind it.
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # the process has ended since
            continue
    children = {process for process, parent in parents.items() if parent == launcher}
    return sorted(process for process, parent in parents.items() if parent in children)


def run_and_kill(words: list[str], folder: Path, moment: Moment, seconds_per_update: float) -> int:
    """Start a run, kill a worker at the given moment, and return how many records there were then."""
    launcher = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    records = folder / "updates.jsonl"
    while len(read_json_lines(records)) < moment.update or len(workers_of(launcher.pid)) < WORKERS:
        if launcher.poll() is not None:
            raise RuntimeError(f"the run ended before {moment}: {launcher.communicate()[1]}")
        time.sleep(POLL_SECONDS)
    time.sleep(moment.fraction * seconds_per_update)
    os.kill(workers_of(launcher.pid)[moment.victim], signal.SIGKILL)
    found = len(read_json_lines(records))
    _, complaint = launcher.communicate()
    if launcher.returncode != 1 or f"rank {moment.victim} of {WORKERS}" not in complaint:
        raise RuntimeError(f"exit code {launcher.returncode} after {moment}, expected 1: {complaint}")
    return found


def written(folder: Path) -> tuple[Any, ...]:
    """Return what must be equal: records, evaluations and model."""
    records = [
        {name: value for name, value in record.items() if name not in OWN}
        for record in read_json_lines(folder / "updates.jsonl")
    ]
    evaluations = [
        (one["step"], one["heldout_loss"]) for one in read_json_lines(folder / "evaluations.jsonl")
    ]
    model = {name: tensor.numpy().tobytes() for name, tensor in torch.load(folder / "model.pt").items()}
    return records, evaluations, model


def seconds_per_update(folder: Path) -> float:
    """Return the mean wall time from one update to the next."""
    records = read_json_lines(folder / "updates.jsonl")
    return sum(record["seconds"] for record in records[1:]) / (len(records) - 1)


def main() -> int:
    """Kill and resume at all moments, write and print the outcomes, and return 0 if every resumed run was equal."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the runs and kill_and_resume.json"
    )
    parser.add_argument(
        "--recipe",
        default="stdlib-gpt --task.size 0.1m --task.data.megabytes 0.5 --task.evaluation-windows 32",
        help="recipe and its options",
    )
    arguments = parser.parse_args()
    recipe = arguments.recipe.split()
    outcomes = []
    for index, moment in enumerate(draw(arguments.seed, arguments.moments)):
        whole = arguments.out / "runs" / f"whole-{moment.strategy}"
        if not (whole / "model.pt").exists():
            subprocess.run(command(recipe, whole, moment.strategy), check=True, stdout=subprocess.DEVNULL)
        folder = arguments.out / "runs" / f"killed-{index}"
        words = command(recipe, folder, moment.strategy)
        found = run_and_kill(words, folder, moment, seconds_per_update(whole))
        checkpoints = sorted(path.name for path in (folder / "checkpoints").glob("*"))
        subprocess.run([*words, "--resume"], check=True, stdout=subprocess.DEVNULL)
        equal = written(folder) == written(whole)
        outcomes.append({**asdict(moment), "records": found, "checkpoints": checkpoints, "equal": equal})
        print(json.dumps(outcomes[-1]), flush=True)
    results = {"moments": outcomes, "recipe": arguments.recipe, "environment": describe_environment()}
    replace_json(arguments.out / "kill_and_resume.json", results)
    return 0 if all(outcome["equal"] for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
