"""Checkpoints and run folders are damaged at random: is anything loaded wrongly, or refused with more than a line?

    python experiments/damaged_checkpoints.py --cases 300 --out benchmarks/results/DATE-damages

Damage: flipped bits; cut, emptied, grown, deleted, exchanged, duplicated and stale files; deep and large JSON; planted
pickles; folders, pipes, devices and links in the place of files and folders. A case ends with an AssertionError that
names its seed, or with what became of it (`tests/checkpoint/damages.py`, `tests/train/damages.py`).
"""

import argparse
import collections
import os
import tempfile
import time
from pathlib import Path

from stretto.machine import describe_environment
from stretto_lab.observe import replace_json
from tests.checkpoint.damages import Damaged
from tests.train.damages import DamagedRuns


def main() -> None:
    """Draw and judge all cases, and print how often each outcome came."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=300, help="of checkpoints, and as many of run folders")
    parser.add_argument("--seed", type=int, default=1000, help="of the first case")
    parser.add_argument("--out", type=Path, help="folder for damages.json")
    options = parser.parse_args()
    out = None if options.out is None else options.out.resolve()
    started = time.perf_counter()
    seeds = range(options.seed, options.seed + options.cases)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for what, kind in {"checkpoints": Damaged, "run folders": DamagedRuns}.items():
            damaged = kind(Path(folder, kind.__name__))
            counts = collections.Counter(damaged.outcome(seed) for seed in seeds)
            found[what] = dict(sorted(counts.items()))
            for outcome, count in found[what].items():
                print(f"{count:5}  {what}: {outcome}", flush=True)
        os.chdir("/")
    line = (
        f"2 x {options.cases} cases in {time.perf_counter() - started:.0f} s: none loaded wrongly, none refused with "
        "more than a line, no pickle run"
    )
    print(line)
    if out is not None:
        content = {
            "summary": line,
            "seed": options.seed,
            "outcomes": found,
            "environment": describe_environment(),
        }
        replace_json(out / "damages.json", content)


if __name__ == "__main__":
    main()
