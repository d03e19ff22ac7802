"""Checkpoints are damaged at random: is any of them loaded wrongly, or refused with more than a line?

    python experiments/damaged_checkpoints.py --cases 300

Damage: flipped bits, cut, deleted, exchanged and stale files, and content of others. A case ends with an AssertionError
that names its seed, or with what became of it.
"""

import argparse
import collections
import tempfile
import time
from pathlib import Path

from tests.checkpoint.damages import Damaged


def main() -> None:
    """Draw and judge all cases, and print how often each outcome came."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1000, help="of the first case")
    options = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        damaged = Damaged(Path(folder))
        seeds = range(options.seed, options.seed + options.cases)
        outcomes = collections.Counter(damaged.outcome(seed) for seed in seeds)
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:5}  {outcome}")
    print(f"{options.cases} cases in {time.perf_counter() - started:.0f} s, none loaded wrongly")


if __name__ == "__main__":
    main()
