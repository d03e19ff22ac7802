"""Where the processor time of an update goes, and how fast values are packed and summed.

    python benchmarks/processor.py --out benchmarks/results/DATE-processor

Needs root for the namespaces. Two workers train the small language model under every arm in turn, without a slow link.
Rank 0 profiles all of its Python threads by their processor time, so waiting costs nothing. What a built-in function
takes counts for the file that calls it. A profile makes short Python functions slower and leaves long ones as they
are: shares of the engine are upper bounds.

Rates are bytes of fp32 values over seconds, one thread, in turns; a share is taken within a turn, against a copy.
"""

import argparse
import collections
import cProfile
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from digests import in_turns
from torch import distributed as dist
from turns import Training, begin_worker, launch, write

from stretto.exchange import WIRES
from stretto.exchange.exchange import sum_in_rank_order
from stretto_lab.recipes import StdlibGPT
from stretto_lab.train.arms import parse_arm
from stretto_lab.train.configuration import RunConfig

ARMS = (
    "ddp",
    "zero1",
    "zero1:wire=int8",
    "zero1:wire=int4",
    "acco",
    "acco:wire=int4",
    "local:rate=0.1:wire=int4",
    "diloco:interval=4:fragments=2:delay=1:keep_progress=on:outer_lr=1:outer_momentum=0:wire=int4",
)
PLACES = {
    "stretto/exchange": "packing, sums, sending",
    "stretto/optimizer": "optimizer",
    "torch/optim": "optimizer",
    "stretto_lab/recipes": "model and data",
    "stretto/averaging": "averages",
    "stretto": "engine",
}
"""By the first one that is part of a file's path; all others are of the model and data."""
WARM_UP = 6
"""Updates."""
VALUES = 2**18
"""As many as a bucket has by default."""


@contextmanager
def profiled() -> Iterator[list[cProfile.Profile]]:
    """Profile this thread, and those that begin inside the block, by their processor time."""
    profiles: list[cProfile.Profile] = []

    def begin(*_: Any) -> None:
        profiles.append(cProfile.Profile(time.thread_time))
        profiles[-1].enable()

    threading.setprofile(begin)
    begin()
    try:
        yield profiles
    finally:
        profiles[0].disable()
        threading.setprofile(None)


def place_of(file: str) -> str:
    """Return where the time of a function in this file goes."""
    path = file.replace(os.sep, "/")
    return next((place for part, place in PLACES.items() if f"/{part}/" in path), "model and data")


def by_place(profiles: list[cProfile.Profile]) -> dict[str, float]:
    """Return seconds by place, of all threads."""
    found: dict[str, float] = collections.defaultdict(float)
    for entry in (entry for profile in profiles for entry in profile.getstats()):
        if isinstance(entry.code, str) or entry.code.co_filename == __file__:
            continue  # a built-in function counts where it is called, and this file is no part of an update
        place = place_of(entry.code.co_filename)
        found[place] += entry.inlinetime
        found[place] += sum(one.inlinetime for one in entry.calls or () if isinstance(one.code, str))
    return found


def profile(arm: str, updates: int) -> dict[str, float]:
    """Return an arm's processor seconds per update by place; all ranks must call, and rank 0's answer counts."""
    run = RunConfig(task=StdlibGPT(evaluation_windows=1), micro_batches=4)
    with profiled() as profiles:
        job = Training(run.run_of(parse_arm(arm)))
        for _ in range(WARM_UP):
            job.update()
        dist.barrier()
        before, processor = by_place(profiles), time.process_time()
        for _ in range(updates):
            job.update()
        processor = time.process_time() - processor
        after = by_place(profiles)
    job.finish()
    return {place: (after[place] - before.get(place, 0.0)) / updates for place in after} | {
        "process": processor / updates
    }


def rates(seconds: float) -> dict[str, dict[str, float]]:
    """Return the rate of packing, unpacking and summing, and its share of that of a copy: medians."""
    values = torch.randn(VALUES, generator=torch.Generator().manual_seed(0))
    target = torch.empty_like(values)
    ways: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(values)}
    for name, wire in WIRES.items():
        packed = torch.empty(wire.of(values.dtype).num_bytes(VALUES), dtype=torch.uint8)
        ways[f"{name}, pack"] = partial(wire.of(values.dtype).write, values, packed)
        ways[f"{name}, unpack"] = partial(
            lambda one, content: target.copy_(one.read(content)), wire.of(values.dtype), packed
        )
    for ranks in (2, 8):
        parts = values.expand(ranks, -1).contiguous()
        ways[f"sum of {ranks}"] = partial(sum_in_rank_order, parts, target)
    found = in_turns(ways, seconds)
    return {
        name: {
            "gigabytes_per_second": 4 * VALUES / statistics.median(taken) / 1e9,
            "share": statistics.median(least / one for one, least in zip(taken, found["copy"], strict=True)),
        }
        for name, taken in found.items()
    }


def main() -> None:
    """Launch the workers, or be one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--updates", type=int, default=24, help="profiled, of every arm")
    parser.add_argument("--seconds", type=float, default=10.0, help="of packing and summing")
    options = parser.parse_args()
    if not begin_worker():
        return launch(2, "none", sys.argv[1:])
    found = {arm: profile(arm, options.updates) for arm in options.arms}
    if dist.get_rank() == 0:
        speeds = rates(options.seconds)
        for arm, taken in found.items():
            whole = taken["process"]
            parts = ", ".join(
                f"{place} {one / whole:.2%}" for place, one in taken.items() if place != "process"
            )
            print(f"{arm:40} {whole:.4f} s: {parts}")
        for name, row in speeds.items():
            print(f"{name:20} {row['gigabytes_per_second']:6.2f} GB/s, {row['share']:.2f} of a copy")
        write(options.out / "processor.json", arms=found, rates=speeds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
