"""Every long command is stopped by every signal, at drawn moments: does anything stay behind, and what is said last?

Each command is started in a session of its own and stopped: by SIGINT and SIGHUP as a terminal sends them, to all of
its processes; by SIGTERM and SIGKILL to the launcher alone, as `kill` does. No process may be left 5 s later, and no
traceback may be printed.

    python experiments/stop_signals.py --repeats 2 --out benchmarks/results/DATE-stop-signals

Linux only.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from kill_and_resume import TINY
from launched import Launched, until

from stretto.machine import describe_environment
from stretto_lab.observe import replace_json

LONG = ["--updates", "1000000"]
COMMANDS = {
    "train": [
        "train",
        f"{TINY}:Tiny",
        *LONG,
        "--no-tensorboard",
        "--checkpoint-every",
        "20",
        "--run-dir",
        "{folder}/run",
    ],
    "resume": ["resume", "{folder}/run"],
    "compare": [
        "compare",
        f"{TINY}:Tiny",
        *LONG,
        "--strategies",
        "ddp,acco,torch-ddp",
        "--out",
        "{folder}/compare",
    ],
    "simulate": ["simulate", f"{TINY}:Tiny", *LONG, "--ranks", "8"],
    "diagnose": ["diagnose", f"{TINY}:Tiny", "--batches", "100000"],
}
STOPS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGKILL")
TO_ALL = ("SIGINT", "SIGHUP")
WITHIN_SECONDS = 5.0
AT_WORK_SECONDS = 12.0
"""Moments are drawn from this time behind the start: while servers and workers start, or at work."""


def stop(name: str, how: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Start a command, stop it after some seconds, and return what came of it."""
    words = [word.replace("{folder}", str(folder)) for word in COMMANDS[name]]
    if name == "resume" and not (folder / "run").exists():
        words = [word.replace("{folder}", str(folder)) for word in COMMANDS["train"]]
    if name == "train":
        shutil.rmtree(folder / "run", ignore_errors=True)
    run = Launched(words, folder / "log")
    started = time.monotonic()
    until(lambda: run.poll() is not None or time.monotonic() - started > seconds, name)
    ended_before = run.poll() is not None
    if not ended_before:
        (os.killpg if how in TO_ALL else os.kill)(run.pid, signal.Signals[how])
    took = until(lambda: run.poll() is not None and not run.processes(), f"the end of {name} after {how}")
    text = run.log.read_text()
    wrong = []
    if ended_before:
        wrong.append("ended by itself")
    if took > WITHIN_SECONDS:
        wrong.append(f"processes were left for {took:.1f} s")
    if "Traceback" in text or "Exception" in text:
        wrong.append("a traceback")
    if how == "SIGINT" and (run.code != 130 or text.splitlines()[-1:] != ["interrupted"]):
        wrong.append("SIGINT is not answered by `interrupted` and 130")
    return {
        "command": name, "signal": how, "seconds": round(seconds, 2), "exit_code": run.code,
        "gone_after_seconds": round(took, 2), "last_lines": text.splitlines()[-2:], "complaints": wrong,
    }  # fmt: skip


def main() -> int:
    """Stop all commands in all ways, write and print the outcomes, and return 0 if nothing was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder for stop_signals.json")
    parser.add_argument(
        "--runs", type=Path, help="folder for what the commands write; OUT/runs where it is not named"
    )
    options = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    generator = random.Random(options.seed)
    folder = (options.runs or options.out / "runs").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    stops = []
    for _ in range(options.repeats):
        for name in COMMANDS:
            for how in STOPS:
                stops.append(stop(name, how, folder, generator.uniform(0.5, AT_WORK_SECONDS)))
                print(json.dumps(stops[-1]), flush=True)
    wrong = [one for one in stops if one["complaints"]]
    slowest = max(one["gone_after_seconds"] for one in stops)
    line = (
        f"{len(stops)} stops, {len(wrong)} with a complaint, all processes gone after at most {slowest:.1f} s"
    )
    content = {"summary": line, "seed": options.seed, "stops": stops, "environment": describe_environment()}
    replace_json(options.out / "stop_signals.json", content)
    print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
