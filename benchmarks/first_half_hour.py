"""What to look at in the first half hour on a device: one command, the most damaging first, one line of JSON each.

    python benchmarks/first_half_hour.py --device cuda --out benchmarks/results/DATE-gpu

Every check runs in a process of its own with a time limit, so that a hang or a crash costs the others nothing. Those
that look at no times run several at once (`--at-once 6`), and the others alone after them. Options take a part of the
list (`--only late_collectives,streams`) and end after a while (`--budget 560`); what has been found before is in the
folder and is not run again. On processors (`--device cpu`) this is a rehearsal, which shows mistakes
of the checks and nothing of a device: its results are no results.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or deterministic products on CUDA are refused
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # on a machine where nothing is installed

import torch  # noqa: E402  # the path comes first

from benchmarks import device_costs, device_models, device_order  # noqa: E402  # the path comes first
from benchmarks.device_checks import Check, Failed  # noqa: E402  # the path comes first

CHECKS: Mapping[str, Check] = {
    "versions": Check(device_order.versions, "what is there"),
    "late_collectives": Check(device_order.late_collectives, "does a collective that ends late end the job"),
    "streams": Check(
        device_order.streams, "does work on two streams have the bits of work that waits", seconds=240
    ),
    "synchronising": Check(device_order.synchronising, "how often the host waits, and for what", seconds=120),
    "speed": Check(
        device_costs.speed, "how long an update takes beside a plain loop", seconds=300, alone=True
    ),
    "hidden": Check(device_costs.hidden, "what of long exchanges computing hides", seconds=240, alone=True),
    "trace": Check(
        device_costs.trace, "does a profiler see computing beside exchanges", seconds=120, alone=True
    ),
    "two_ranks": Check(
        device_order.two_ranks, "do two ranks on one device hold the same", ranks=2, seconds=120
    ),
    "late_rank": Check(device_order.late_rank, "does a late rank end the job", ranks=2, seconds=120),
    "times": Check(device_order.times, "are waits told from work", alone=True),
    "clock": Check(device_order.clock, "does a clock count what was computed", alone=True),
    "beside": Check(device_costs.beside, "are long collectives hidden", seconds=120, alone=True),
    "memory": Check(device_costs.memory, "what is held after the start", ranks=2, needs_cuda=True),
    "wires": Check(device_models.wires, "do packed wires have a processor's bits"),
    "compiled": Check(device_models.compiled, "do compiled models train as in a plain loop", seconds=240),
    "convolutions": Check(device_models.convolutions, "do convolutions train as in a plain loop"),
    "own_stream": Check(device_models.own_stream, "may a loop use a stream of its own"),
    "echoed": Check(device_models.echoed, "are echoed batches those that were loaded"),
    "ended_jobs": Check(
        device_costs.ended_jobs, "what ended jobs leave on the device", seconds=120, alone=True
    ),
    "launches": Check(device_costs.launches, "what a bucket costs the host", seconds=240, alone=True),
    "commands": Check(device_costs.commands, "what a newcomer sees", seconds=500),
    "suite": Check(device_costs.suite, "do the tests of a device pass", seconds=580),
}
REHEARSED_BY_TESTS = tuple(
    name
    for name, check in CHECKS.items()
    if not check.needs_cuda and name not in ("commands", "launches", "suite")
)
"""Those that `tests/gpu` runs: the others run commands or tests themselves, or have nothing to do without a device."""


def perform(name: str, device: str) -> dict[str, Any]:
    """Run a check on this rank; raises `Failed`."""
    torch.manual_seed(0)
    return CHECKS[name].run(torch.device(device))


def perform_rank(info: Any, name: str, device: str) -> dict[str, Any]:
    """Run a check on one of several local ranks, in a Gloo group."""
    from stretto.groups import Link  # this process may have another check to run
    from stretto_lab.train.workers import joined_group

    with joined_group(info, Link.parse("none"), torch.device("cpu"), 60.0):
        return perform(name, device)


def one(name: str, device: str) -> dict[str, Any]:
    """Return the line of one check; called in its own process."""
    begun = time.perf_counter()
    try:
        if CHECKS[name].ranks:
            from stretto_lab.train.launch import Ranks

            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            facts = Ranks.local(CHECKS[name].ranks).call(perform_rank, name, device)[0]
        else:
            facts = perform(name, device)
        verdict: dict[str, Any] = {"passed": True, "facts": facts}
    except Failed as failure:
        verdict = {"passed": False, "error": str(failure)}
    except Exception:
        verdict = {"passed": False, "error": traceback.format_exc()[-2000:]}
    return {"check": name, "seconds": round(time.perf_counter() - begun, 1), **verdict}


def supervised(name: str, device: str, limit: float) -> dict[str, Any]:
    """Run one check in a process group of its own, which is killed when its time is up."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--one", name, "--device", device],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        return {"check": name, "seconds": limit, "passed": False, "error": f"time is up; {said[-1500:]}"}
    lines = [line for line in said.splitlines() if line.startswith('{"check"')]
    if process.returncode or not lines:
        error = f"exit code {process.returncode}; {said[-1500:]}"
        return {"check": name, "seconds": None, "passed": False, "error": error}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def main() -> int:
    """Run what was asked for, and return 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda, or cpu for a rehearsal")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--only", default="", help="names of checks, with commas between them")
    parser.add_argument("--at-once", type=int, default=1, help="processes for checks that look at no times")
    parser.add_argument("--budget", type=float, default=1800.0, help="seconds after which no check is begun")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one, options.device), default=str))
        return 0
    if options.out is None:
        parser.error("expected --out FOLDER")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "checks.jsonl"
    known = {json.loads(line)["check"] for line in path.read_text().splitlines()} if path.exists() else set()
    names = options.only.split(",") if options.only else [name for name in CHECKS if name not in known]
    begun, failed = time.monotonic(), 0

    def look(name: str) -> dict[str, Any]:
        left = options.budget - (time.monotonic() - begun)
        if left <= 0:
            return {}
        found = supervised(name, options.device, min(CHECKS[name].seconds, max(left, 1.0)))
        return found | {"question": CHECKS[name].question, "device": options.device}

    fitting = [name for name in names if options.device != "cpu" or not CHECKS[name].needs_cuda]
    for processes, alone in ((options.at_once, False), (1, True)):
        some = [name for name in fitting if CHECKS[name].alone is alone]
        with ThreadPoolExecutor(processes) as pool:
            for done in as_completed([pool.submit(look, name) for name in some]):
                if not (line := done.result()):
                    continue
                with path.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                failed += not line["passed"]
                verdict = "passed" if line["passed"] else "FAILED"
                print(f"{verdict}  {line['check']}: {line.get('error', '')[-300:]}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
