"""Methods side by side in the same workers: a few updates of each in turn, and ratios taken within a turn.

    python benchmarks/turns.py --arms torch-ddp compute ddp zero1 torch-ddp-zero --out benchmarks/results/DATE-fast

Needs root for the namespaces. The workers, one thread each, hold the jobs of all arms at once. When an update has been
returned nothing is under way, so that arms do not disturb each other. Every turn begins with another arm. So what slows
a machine for a while slows all arms of a turn. The others are compared with the first arm; if that one
is named twice, its twin shows what the machine does by itself. Rank 0 writes a JSON file for each rate and number of
workers, and prints the table: seconds on the clock, and of the processor, over all threads of rank 0.
"""

import argparse
import collections
import itertools
import os
import statistics
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from namespaces import Namespaces
from scipy import stats
from torch import distributed as dist

from stretto.machine import describe_environment
from stretto_lab.observe import replace_json
from stretto_lab.recipes import StdlibGPT
from stretto_lab.train.arms import parse_arm
from stretto_lab.train.configuration import RunConfig
from stretto_lab.train.handle import open_handle
from stretto_lab.train.shards import placed

WARM_UP_TURNS = 3
"""First turns, which are left out: they use memory for the first time."""


class Taken(NamedTuple):
    """Seconds per update."""

    clock: float
    """From one moment at which all ranks were ready to the next."""
    processor: float
    """Of all threads of this rank."""


class Updating(Protocol):
    """A job that makes one update after the other."""

    def update(self) -> None:
        """Train until an update has been returned."""

    def finish(self) -> None:
        """End the job."""


class Training:
    """One arm's job on this rank, on the small language model."""

    def __init__(self, run: RunConfig[StdlibGPT]) -> None:
        self._task = run.task.build(dist.get_rank(), dist.get_world_size(), 0, None)
        mesh = placed(self._task, run, torch.device("cpu"))
        self._handle = open_handle(run, self._task.model, self._task.optimizer, mesh=mesh)
        self._batches = self._handle.feed(itertools.chain.from_iterable(itertools.repeat(self._task.loader)))

    def update(self) -> None:
        """Train until an update has been returned."""
        loss_function = partial(self._task.loss, self._handle.model)
        for batch in self._batches:
            if update := self._handle.micro_batch(loss_function, batch):
                if update.incidents:
                    raise SystemExit(f"a false alarm: {update.incidents}")
                return

    def finish(self) -> None:
        """End the job."""
        self._handle.finish()


def measure(
    jobs: Mapping[str, Updating], seconds: float, updates: int, warm_up: int = WARM_UP_TURNS
) -> dict[str, list[Taken]]:
    """Return what every arm took, by turn, for about `seconds`; all ranks must call. The jobs have ended then."""
    order = collections.deque(jobs)
    found: dict[str, list[Taken]] = {name: [] for name in jobs}
    end = torch.zeros(1)
    turn, started = 0, 0.0
    while not end:
        if turn == warm_up:
            started = time.perf_counter()
        for name in order:
            taken = _take(jobs[name], updates)
            if turn >= warm_up:
                found[name].append(taken)
        turn += 1
        order.rotate(-1)
        # Rank 0's clock decides for all.
        end[0] = turn > warm_up and time.perf_counter() - started >= seconds
        dist.broadcast(end, 0)
    for job in jobs.values():
        job.finish()
    return found


def _take(job: Training, updates: int) -> Taken:
    """Make some updates and return what they took."""
    dist.barrier()
    started, processor = time.perf_counter(), time.process_time()
    for _ in range(updates):
        job.update()
    dist.barrier()
    return Taken((time.perf_counter() - started) / updates, (time.process_time() - processor) / updates)


def ratios(found: Mapping[str, list[Taken]]) -> dict[str, dict[str, Any]]:
    """Return every arm's median seconds, and its ratios to the first arm, turn by turn: quartiles.

    With the clock's comes the 95 % interval of the median; NaN where turns are too few.
    """
    base = next(iter(found.values()))
    table: dict[str, dict[str, Any]] = {}
    for name, taken in found.items():
        pairs = list(zip(taken, base, strict=True))
        clock = [one.clock / other.clock for one, other in pairs]
        table[name] = {
            "turns": len(taken),
            "seconds": statistics.median(one.clock for one in taken),
            "clock": _quartiles(clock),
            "median_lies_in": list(stats.quantile_test(clock, q=1.0, p=0.5).confidence_interval(0.95)),
            "processor": _quartiles([one.processor / other.processor for one, other in pairs]),
        }
    return table


def _quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4) if len(values) > 1 else values * 3


def show(what: str, table: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a row per arm."""
    for name, row in table.items():
        (low, clock, high), (_, processor, _) = row["clock"], row["processor"]
        least, most = row["median_lies_in"]
        print(
            f"{what:14} {name:24} {row['seconds']:7.4f} s  {clock:.3f} ({low:.3f} to {high:.3f}, quartiles of "
            f"{row['turns']} turns; median in {least:.3f} to {most:.3f}), processor {processor:.3f}",
            flush=True,
        )


def begin_worker() -> bool:
    """Join the other workers, where this process is one, and return whether it is."""
    if "RANK" not in os.environ:
        return False
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return True


def launch(nodes: int, rate: str, words: list[str], per_node: int = 1) -> None:
    """Run this script again as every worker, on nodes behind links of `rate`."""
    with Namespaces(nodes, rate) as network:
        codes = network.run([sys.executable, sys.argv[0], *words], ranks_per_node=per_node)
    if any(codes):
        raise SystemExit(f"a worker failed: exit codes {codes}")


def write(path: Path, **content: Any) -> None:
    """Write what was measured, with a description of the machine."""
    replace_json(path, {**content, "environment": describe_environment()})


def main() -> None:
    """Launch the workers, or be one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", nargs="+", required=True, help="the first is what others are compared with")
    parser.add_argument("--rate", default="none", help="of every link, in each direction")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--per-node", type=int, default=1, help="workers that share a node and its link")
    parser.add_argument("--micro-batches", type=int, default=4, help="per rank and update")
    parser.add_argument("--seconds", type=float, default=100.0, help="without warm-up")
    parser.add_argument("--updates", type=int, default=2, help="of an arm in one turn")
    options = parser.parse_args()
    job = RunConfig(task=StdlibGPT(evaluation_windows=1), micro_batches=options.micro_batches)
    arms = [parse_arm(text) for text in options.arms]
    if not begin_worker():
        return launch(options.workers // options.per_node, options.rate, sys.argv[1:], options.per_node)
    jobs: dict[str, Updating] = {}
    for arm in arms:
        jobs[arm.text + ", its twin" * (arm.text in jobs)] = Training(job.run_of(arm))
    found = measure(jobs, options.seconds, options.updates)
    if dist.get_rank() == 0:
        what = f"{options.rate}-{options.workers}" + (
            f"-by-{options.per_node}" if options.per_node > 1 else ""
        )
        table = ratios(found)
        show(what, table)
        chosen = {**vars(options), "out": None}
        write(options.out / f"{what}.json", options=chosen, ratios=table, seconds=found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
