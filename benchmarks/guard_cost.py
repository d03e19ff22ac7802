"""What guards cost: seconds of an update with them over seconds without, over slow sockets.

    python benchmarks/guard_cost.py --out benchmarks/results/DATE-guard-cost

Needs root for the namespaces. Two workers, one thread each, hold the jobs of all arms of a strategy at once. They make
one update of each arm in turn, and every turn begins with another arm. When an update has been returned nothing is
under way, so that arms do not disturb each other. Seconds are those until both workers are done, and a ratio is taken
within a turn. Rank 0 writes RATE.json and prints the table.
"""

import argparse
import collections
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from namespaces import Namespaces
from torch import distributed as dist

import stretto as st
from stretto.observe import replace_json
from stretto.recipes import StdlibGPT
from stretto.train.outcome import describe_environment

STRATEGIES: dict[str, Callable[[], st.Strategy]] = {"ddp": st.DDP, "zero1": st.ZeRO1, "acco": st.ACCO}
MICRO_BATCHES = 4
"""Per update and rank, as in benchmarks/speed.py."""
WARM_UP_TURNS = 3
"""First turns, which are left out: they use memory for the first time."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """The guards of a job."""

    guards: tuple[st.Guard, ...] = ()
    verified: bool = False


def arms_of(strategy: str) -> dict[str, Arm]:
    """Return the arms of a strategy, the one without guards first."""
    arms = {"none": Arm(), "verified": Arm(verified=True)}
    replica: tuple[st.Guard, ...] = ()
    if strategy == "ddp":
        replica = (st.ReplicaGuard(),)
        arms["replica"] = Arm(guards=replica)
    arms["rest"] = Arm(guards=(st.AtRest(),))
    arms["all"] = Arm(guards=(*replica, st.AtRest()), verified=True)
    return arms


class Training:
    """One arm's job on this rank."""

    def __init__(self, strategy: str, arm: Arm) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self._task = StdlibGPT(evaluation_windows=1).build(rank, world_size, 0, None)
        self._parallel = st.DataParallel(
            self._task.model,
            self._task.optimizer,
            STRATEGIES[strategy](),
            micro_batches=MICRO_BATCHES,
            guards=arm.guards,
            options=st.Options(verified=arm.verified),
        )
        self._batches = self._forever()

    def update(self) -> None:
        """Train until an update has been returned."""
        for batch in self._batches:
            loss = self._task.loss(self._task.model, batch)
            if update := self._parallel.backward(loss.value, loss.weight, loss.samples):
                if update.incidents:
                    raise SystemExit(f"a false alarm: {update.incidents}")
                return

    def finish(self) -> None:
        """End the job."""
        self._parallel.finish()

    def _forever(self) -> Iterator[object]:
        while True:
            yield from self._task.loader


def measure(strategy: str, seconds: float) -> dict[str, list[float]]:
    """Return the seconds of every update of every arm, by turn, for about `seconds`."""
    jobs = {name: Training(strategy, arm) for name, arm in arms_of(strategy).items()}
    order = collections.deque(jobs)
    found: dict[str, list[float]] = {name: [] for name in jobs}
    end = torch.zeros(1)
    turn, started = 0, 0.0
    while not end:
        if turn == WARM_UP_TURNS:
            started = time.perf_counter()
        for name in order:
            taken = seconds_of(jobs[name].update)
            if turn >= WARM_UP_TURNS:
                found[name].append(taken)
        turn += 1
        order.rotate(-1)
        # Rank 0's clock decides for all.
        end[0] = turn > WARM_UP_TURNS and time.perf_counter() - started >= seconds
        dist.broadcast(end, 0)
    for job in jobs.values():
        job.finish()
    return found


def seconds_of(work: Callable[[], None]) -> float:
    """Return how long it takes until all ranks have done `work`."""
    dist.barrier()
    started = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - started


def ratios(found: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return every arm's median seconds, and its ratio to no guards, taken turn by turn: median and quartiles."""
    table = {}
    for name, seconds in found.items():
        paired = [one / bare for one, bare in zip(seconds, found["none"], strict=True)]
        low, median, high = statistics.quantiles(paired, n=4) if len(paired) > 1 else paired * 3
        table[name] = {
            "turns": len(paired),
            "seconds": statistics.median(seconds),
            "ratio": median,
            "low": low,
            "high": high,
        }
    return table


def work(rate: str, seconds: float, out: Path) -> None:
    """Be one of the workers: measure every strategy."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {}
    for strategy in STRATEGIES:
        found = measure(strategy, seconds)
        results[strategy] = {"ratios": ratios(found), "seconds": found}
        if dist.get_rank() == 0:
            show(rate, strategy, results[strategy]["ratios"])
    if dist.get_rank() == 0:
        report = {"rate": rate, "environment": describe_environment(), "strategies": results}
        replace_json(out / f"{rate}.json", report)
    dist.destroy_process_group()


def show(rate: str, strategy: str, table: dict[str, dict[str, float]]) -> None:
    """Print the rows of one strategy."""
    for name, row in table.items():
        print(
            f"{rate:8} {strategy:6} {name:9} {row['seconds']:7.4f} s  {row['ratio'] - 1:+7.2%} "
            f"({row['low'] - 1:+.2%} to {row['high'] - 1:+.2%}, quartiles of {row['turns']} turns)",
            flush=True,
        )


def main() -> None:
    """Launch the workers, or be one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"])
    parser.add_argument(
        "--seconds", type=float, default=100.0, help="of a strategy at a rate, without warm-up"
    )
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options.rates[0], options.seconds, options.out)
        return
    for rate in options.rates:
        command = [sys.executable, __file__, "--rates", rate, "--seconds", str(options.seconds)]
        with Namespaces(2, rate) as network:
            codes = network.run([*command, "--out", str(options.out)])
        if any(codes):
            raise SystemExit(f"a worker failed: exit codes {codes}")


if __name__ == "__main__":
    main()
