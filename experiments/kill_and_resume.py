"""Runs are killed again and again at any moment, and resumed: do they end, to the bit, as runs that nobody disturbed?

A run is killed ten times and then goes on to its end, always by `stretto resume`. A kill is drawn from a seed: whom
it hits (a worker, the launcher, or all processes at once, as a terminal or a batch system does), by which signal, and
when (while the run starts, a share of an update after an update, or inside a save). Records, evaluations and model must
equal those of an undisturbed run to the bit. Only what a rank measured (times, bytes sent) may differ. No process may
stay behind, no checkpoint may come out damaged, and nothing but the library's own lines may be printed.

    python experiments/kill_and_resume.py --kills 100 --out benchmarks/results/DATE-kill-and-resume

Launchers are forked from this process, which has imported PyTorch, and not started anew (`launched.py`). Linux only.
"""

import argparse
import collections
import dataclasses
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from launched import Launched, until

from stretto.machine import describe_environment
from stretto_lab.observe import read_json_lines, replace_json

STRATEGIES = (
    "acco", "wp", "dpu", "zero1", "ddp", "local:rate=0.3", "acco:wire=int8", "zero1:wire=int4", "paft-sync", "zero1"
)  # fmt: skip
KILLS_PER_RUN = 10
UPDATES = 60
WORKERS = 2
OWN = {"seconds", "lane_seconds", "exposed_seconds", "training_seconds", "sent_bytes", "wait_seconds"}
"""Fields of a record in which two equal runs may differ: what a rank measured."""
ENDS_WITHIN = {"launcher": 5.0, "all": 5.0, "worker": 15.0}
"""Seconds until no process is left. After a worker's death the others have to notice it first, and say so."""
TINY = Path(__file__).resolve().parents[1] / "tests" / "train" / "tiny.py"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kill:
    """Who is killed, how and when."""

    whom: str
    """launcher, worker, or all."""
    rank: int
    """Of the worker."""
    signal: str
    when: str
    """start, update or save."""
    after: int
    """The update, or the save, counted from where the run goes on."""
    fraction: float
    """And this share later of the time that starting, an update or a save takes."""


def draw(generator: random.Random) -> Kill:
    """Draw a kill. Workers ignore SIGINT, so that one goes to the launcher, or from a terminal to all."""
    whom = generator.choice(["worker", "worker", "launcher", "all"])
    mild = ["SIGTERM"] if whom == "worker" else ["SIGTERM", "SIGINT"]
    when = generator.choice(["start", "update", "update", "save", "save"])
    return Kill(
        whom=whom,
        rank=generator.randrange(WORKERS),
        signal=generator.choice(["SIGKILL"] * 4 + mild * (2 // len(mild))),
        when=when,
        after=generator.randrange(1, 4),
        fraction=round(generator.random(), 3),
    )


@dataclasses.dataclass(frozen=True)
class Pace:
    """Seconds that parts of an undisturbed run take."""

    start: float
    """To the first update."""
    joined: float
    """Of that, behind the moment at which all workers are there."""
    update: float
    save: float


def train_words(recipe: Sequence[str], folder: Path, strategy: str) -> list[str]:
    """Return the command of a run that evaluates and saves often."""
    return [
        "train", *recipe, "--strategy", strategy, "--updates", str(UPDATES), "--workers", str(WORKERS),
        "--micro-batches", "2", "--checkpoint-every", "2", "--evaluate-every", "3", "--run-dir", str(folder),
        "--no-tensorboard",
    ]  # fmt: skip


def go_on_words(recipe: Sequence[str], folder: Path, strategy: str) -> list[str]:
    """Return the command that goes on with a run, or begins it where the last kill came before its first file."""
    begun = (folder / "config.json").exists()
    return ["resume", str(folder)] if begun else train_words(recipe, folder, strategy)


def new_saves(folder: Path, known: frozenset[str]) -> list[str]:
    """Return what is being written beside what dead runs have left."""
    found = [entry.name for entry in folder.glob("checkpoints/.writing-*")]
    return [name for name in found if name not in known]


def wait_for(kill: Kill, run: Launched, folder: Path, pace: Pace) -> None:
    """Wait for the moment of a kill, or for the end of the run."""
    records, before = folder / "updates.jsonl", frozenset(new_saves(folder, frozenset()))
    finished = {entry.name for entry in folder.glob("checkpoints/0*")}
    latest = max((int(name.rpartition("-")[2]) for name in finished), default=0)

    def is_due() -> bool:
        if run.poll() is not None:
            return True
        if kill.when == "start":
            return kill.whom != "worker" or len(run.workers()) == WORKERS
        if kill.when == "save":
            later = [
                name
                for name in new_saves(folder, before)
                if int(name.rpartition("-")[2]) > latest + kill.after
            ]
            return bool(later)
        if not records.exists() or records.stat().st_mtime_ns < run.started:
            return False
        return len(read_json_lines(records)) >= latest + kill.after

    until(is_due, f"the moment of {kill}")
    if run.poll() is None:
        part = "joined" if kill.when == "start" and kill.whom == "worker" else kill.when
        time.sleep(kill.fraction * getattr(pace, part))


def strike(kill: Kill, run: Launched) -> str:
    """Send the signal; return who was hit."""
    number = signal.Signals[kill.signal]
    if kill.whom == "all":
        os.killpg(run.pid, number)
        return "all"
    workers = run.workers() if kill.whom == "worker" else []
    if len(workers) == WORKERS:
        os.kill(workers[kill.rank], number)
        return "worker"
    os.kill(run.pid, number)  # there is no worker yet, or no more
    return "launcher"


def complaints(kill: Kill, hit: str, run: Launched, seconds: float) -> list[str]:
    """Return what was wrong with the end of a run."""
    text, found = run.log.read_text(), []
    if seconds > ENDS_WITHIN[hit]:
        found.append(f"processes were left for {seconds:.1f} s")
    number = signal.Signals[kill.signal].value
    codes = {"worker": (1,), "launcher": (-number, 128 + number), "all": (-number, 128 + number, 1)}[hit]
    if run.code not in (*codes, 0):  # 0: the signal came when all was done
        found.append(f"exit code {run.code}")
    if "Traceback" in text or "Exception" in text:
        found.append("a traceback")
    if run.code == 130 and text.splitlines()[-1:] != ["interrupted"]:
        found.append("the last line is not `interrupted`")
    return found


def kill_once(words: Sequence[str], folder: Path, kill: Kill, pace: Pace) -> dict[str, Any]:
    """Run a command, kill it, and return what came of it."""
    run = Launched(words, folder.with_suffix(".log"))
    wait_for(kill, run, folder, pace)
    hit = "nobody" if run.poll() is not None else strike(kill, run)
    seconds = until(lambda: run.poll() is not None and not run.processes(), f"the end after {kill}")
    wrong = [f"ended with {run.code} before"] if hit == "nobody" else complaints(kill, hit, run, seconds)
    if wrong:
        shutil.copy(run.log, folder.with_suffix(f".{time.time_ns()}.log"))
    return {
        **dataclasses.asdict(kill),
        "hit": hit,
        "exit_code": run.code,
        "gone_after_seconds": round(seconds, 2),
        "records": len(read_json_lines(folder / "updates.jsonl")),
        "checkpoints": sorted(path.name for path in folder.glob("checkpoints/*")),
        "complaints": wrong,
    }


def undisturbed(words: Sequence[str], folder: Path) -> Pace:
    """Make a whole run, and return its pace."""
    run = Launched(words, folder.with_suffix(".log"))
    records = folder / "updates.jsonl"
    start = until(lambda: run.poll() is not None or len(run.workers()) == WORKERS, "the workers")
    joined = until(lambda: run.poll() is not None or len(read_json_lines(records)) > 0, "the first update")
    since = time.monotonic()
    if code := run.wait():
        raise RuntimeError(f"exit code {code}: {run.log.read_text()}")
    whole = time.monotonic() - since
    found = read_json_lines(records)
    update = sum(record["seconds"] for record in found[1:]) / (len(found) - 1)
    return Pace(start + joined, joined, update, max(0.005, (whole / UPDATES - update) * 2))


def written(folder: Path) -> tuple[Any, ...]:
    """Return what must be equal: records, evaluations and model."""
    records = [
        {name: value for name, value in record.items() if name not in OWN}
        for record in read_json_lines(folder / "updates.jsonl")
    ]
    evaluations = [
        (one["step"], one["heldout_loss"]) for one in read_json_lines(folder / "evaluations.jsonl")
    ]
    model = {
        name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes()  # NumPy knows no bfloat16
        for name, tensor in torch.load(folder / "model.pt").items()
    }
    return records, evaluations, model


def run_of_kills(folder: Path, recipe: Sequence[str], strategy: str, kills: Sequence[Kill]) -> dict[str, Any]:
    """Kill one run many times, let it end, and return how."""
    whole = folder.with_name(f"{folder.name}-whole")
    pace = undisturbed(train_words(recipe, whole, strategy), whole)
    outcomes = []
    for kill in kills:
        outcomes.append(kill_once(go_on_words(recipe, folder, strategy), folder, kill, pace))
        print(json.dumps(outcomes[-1]), flush=True)
    last = Launched(go_on_words(recipe, folder, strategy), folder.with_suffix(".log"))
    code = last.wait()
    equal = code == 0 and written(folder) == written(whole)
    damaged = (folder / "incidents.jsonl").exists()
    return {
        "strategy": strategy,
        "exit_code": code,
        "equal": equal,
        "found_damage": damaged,
        "kills": outcomes,
    }


def summary(runs: Sequence[dict[str, Any]]) -> str:
    """Return the outcome in one line."""
    kills = [kill for run in runs for kill in run["kills"]]
    hits = collections.Counter(f"{kill['hit']} {kill['signal']}" for kill in kills if kill["hit"] != "nobody")
    good = sum(run["equal"] and not run["found_damage"] for run in runs)
    wrong = sum(bool(kill["complaints"]) for kill in kills)
    slowest = max((kill["gone_after_seconds"] for kill in kills), default=0.0)
    return (
        f"{sum(hits.values())} kills ({', '.join(f'{n} {what}' for what, n in sorted(hits.items()))}) in {len(runs)} "
        f"runs: {good} runs equal to the bit, {wrong} kills with a complaint, all processes gone after at most "
        f"{slowest:.1f} s"
    )


def main() -> int:
    """Kill and resume, write and print the outcomes, and return 0 if every run ended as it should."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder for kill_and_resume.json")
    parser.add_argument("--runs", type=Path, help="folder for the runs; OUT/runs where it is not named")
    parser.add_argument("--recipe", default=f"{TINY}:Tiny", help="recipe and its options")
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    generator = random.Random(options.seed)
    home = options.runs or options.out / "runs"
    home.mkdir(parents=True, exist_ok=True)
    runs: list[dict[str, Any]] = []
    started, left = time.monotonic(), options.kills
    while left:
        kills = [draw(generator) for _ in range(min(left, KILLS_PER_RUN))]
        strategy = STRATEGIES[len(runs) % len(STRATEGIES)]
        runs.append(run_of_kills(home / f"run-{len(runs)}", options.recipe.split(), strategy, kills))
        left -= len(kills)
        content = {
            "summary": summary(runs), "seconds": round(time.monotonic() - started), "seed": options.seed,
            "recipe": options.recipe, "runs": runs, "environment": describe_environment(),
        }  # fmt: skip
        replace_json(options.out / "kill_and_resume.json", content)
    print(summary(runs))
    return 0 if all(run["equal"] and not run["found_damage"] for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
