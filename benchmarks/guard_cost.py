"""What guards cost: seconds of an update with them over seconds without, over slow sockets, in turns.

    python benchmarks/guard_cost.py --out benchmarks/results/DATE-guard-cost

As `turns.py`, whose notes hold here: two workers, one thread each, in namespaces, which need root. Rank 0
writes RATE.json.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

from torch import distributed as dist
from turns import Training, begin_worker, launch, measure, ratios, show, write

from stretto_lab.recipes import StdlibGPT
from stretto_lab.train.configuration import RunConfig

STRATEGIES = ("ddp", "zero1", "acco")
MICRO_BATCHES = 4
"""Per update and rank, as in benchmarks/speed.py."""


def arms_of(strategy: str) -> dict[str, RunConfig[StdlibGPT]]:
    """Return the arms of a strategy, the one without guards first."""
    bare = RunConfig(task=StdlibGPT(evaluation_windows=1), strategy=strategy, micro_batches=MICRO_BATCHES)
    replica = ("replica",) if strategy == "ddp" else ()
    arms = {"none": bare, "verified": dataclasses.replace(bare, verified=True)}
    if replica:
        arms["replica"] = dataclasses.replace(bare, guards=replica)
    arms["rest"] = dataclasses.replace(bare, guards=("rest",))
    arms["all"] = dataclasses.replace(bare, guards=(*replica, "rest"), verified=True)
    return arms


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
    parser.add_argument("--updates", type=int, default=1, help="of an arm in one turn")
    options = parser.parse_args()
    if not begin_worker():
        for rate in options.rates:
            launch(2, rate, [*sys.argv[1:], "--rates", rate])
        return
    (rate,), results = options.rates, {}
    for strategy in STRATEGIES:
        jobs = {name: Training(run) for name, run in arms_of(strategy).items()}
        found = measure(jobs, options.seconds, options.updates)
        results[strategy] = {"ratios": ratios(found), "seconds": found}
        if dist.get_rank() == 0:
            show(f"{rate} {strategy}", results[strategy]["ratios"])
    if dist.get_rank() == 0:
        write(options.out / f"{rate}.json", rate=rate, updates=options.updates, strategies=results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
