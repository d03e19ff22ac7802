"""A rank is killed at any moment of a transfer: do all others name it within two seconds?

Every trial is a job on 2 to 4 nodes, each a network namespace behind a link of 10 or 100 Mbit/s or none. Strategy,
wire, model and buckets are drawn, and so is when a rank is killed, once all have met: while they connect, while the job
starts, in the middle of a message, or between two. Nothing but connections can tell: time-out and `silent_seconds` are
ten minutes, and nobody who supervises processes says anything.

    python experiments/struck_transfers.py --trials 300 --out benchmarks/results/DATE-struck-transfers

`--blind` takes away the look at descriptors, without which trials must fail. Needs Linux, root and iproute2.
"""

import argparse
import dataclasses
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launched import until
from lost_ranks import address_of, forked, in_a_process, lines_of, run_all, tell
from torch.distributed import TCPStore

import stretto as st
from benchmarks.namespaces import Namespaces
from benchmarks.recovery import network
from stretto.groups.connections import Connection
from stretto.machine import describe_environment
from stretto.strategies import STRATEGIES

NEVER = 600.0
NAMED_WITHIN = 2.0
PATIENCE_SECONDS = 30.0
"""After the kill, for all to say what they have found."""
MOMENT_SECONDS = 4.0
"""The latest moment after all ranks have met."""
PORT = 29400


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One job, and when one of its ranks is killed."""

    seed: int
    ranks: int
    victim: int
    seconds: float
    """After all ranks have met."""
    rate: str
    strategy: str
    wire: str
    width: int
    """The model has about the square of it in parameters."""
    bucket_bytes: int


def drawn(seed: int) -> Trial:
    """Draw a trial."""
    rng = random.Random(seed)
    ranks = rng.choice([2, 3, 3, 4])
    return Trial(
        seed=seed,
        ranks=ranks,
        victim=rng.randrange(ranks),
        seconds=round(rng.uniform(0, MOMENT_SECONDS), 3),
        rate=rng.choice(["none", "100mbit", "10mbit"]),
        strategy=rng.choice(["ddp", "zero1", "acco", "diloco"]),
        wire=rng.choice(["fp32", "bf16", "int8"]),
        width=rng.choice([64, 300, 1000]),
        bucket_bytes=rng.choice([4096, 65536, 512 * 1024, 25 * 2**20]),
    )


def train(trial: Trial, rank: int, said: Path) -> None:
    """Train until an error, and tell it."""
    store = TCPStore(address_of(trial.ranks), PORT, is_master=False, timeout=timedelta(seconds=60))
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    dist.init_process_group("gloo", store=store, rank=rank, world_size=trial.ranks)
    model = network(trial.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    try:
        parallel = st.DataParallel(
            model,
            optimizer,
            STRATEGIES[trial.strategy](),
            micro_batches=2,
            options=st.Options(
                wire=trial.wire, bucket_bytes=trial.bucket_bytes, timeout_seconds=NEVER, silent_seconds=NEVER
            ),
        )
        tell(said, trains=True)
        while True:
            parallel.backward(model(torch.ones(2, 8)).square().mean())
    except st.StrettoError as error:
        tell(said, error=type(error).__name__, text=str(error))


def run_trial(trial: Trial, folder: Path) -> dict[str, Any]:
    """Run one trial in this process, which has no other; return what became of it."""
    folder.mkdir(parents=True)
    said = [folder / f"{rank}.jsonl" for rank in range(trial.ranks)]
    for path in (*said, folder / "store"):
        path.touch()
    with Namespaces(trial.ranks + 1, trial.rate) as network:
        host = forked(network.spaces[-1], folder / "store", lambda: _host(trial.ranks))
        until(lambda: "listens" in (folder / "store").read_text(), "the store")
        processes = [
            forked(
                network.spaces[rank], folder / f"{rank}.log", lambda rank=rank: train(trial, rank, said[rank])
            )
            for rank in range(trial.ranks)
        ]
        until(lambda: f"{trial.ranks} have come" in (folder / "store").read_text(), "all ranks")
        time.sleep(trial.seconds)
        had_begun = all(map(lines_of, said))
        at = time.monotonic()
        os.kill(processes[trial.victim], signal.SIGKILL)
        others = [path for rank, path in enumerate(said) if rank != trial.victim]
        while time.monotonic() < at + PATIENCE_SECONDS and not all(map(_error_of, others)):
            time.sleep(0.02)
        for pid in (*processes, host):
            os.kill(pid, signal.SIGKILL)
    errors = [_error_of(path) for path in others]
    named = f"rank {trial.victim} died"
    faults = [line["text"] for line in errors if line and named not in line["text"]]
    faults += [f"{errors.count({})} of {len(errors)} have not noticed"] if {} in errors else []
    seconds = [round(line["at"] - at, 3) for line in errors if line]
    if seconds and max(seconds) > NAMED_WITHIN:
        faults.append(f"named after {max(seconds)} s")
    return {
        "while": "training" if had_begun else "starting",
        "named_after_seconds": seconds,
        "faults": faults,
    }


def _host(ranks: int) -> None:
    store = TCPStore("0.0.0.0", PORT, is_master=True, wait_for_workers=False)
    print("listens", flush=True)
    until(lambda: sum("/connections/" in key for key in store.list_keys()) == ranks, "all ranks")
    print(f"{ranks} have come", flush=True)
    signal.pause()


def _error_of(path: Path) -> dict[str, Any]:
    return next((line for line in lines_of(path) if "error" in line), {})


def main(words: Sequence[str] | None = None) -> int:
    """Run the trials; return 1 if one has failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--blind", action="store_true", help="without the look at descriptors")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    if options.blind:
        Connection.is_open = property(lambda _: True)  # type: ignore[method-assign]  # what --blind is for
    options.out.mkdir(parents=True, exist_ok=True)

    def run(trial: Trial) -> dict[str, Any]:
        folder = options.out / f"trial-{trial.seed}"
        found = in_a_process(lambda: run_trial(trial, folder)) or {
            "while": "?", "named_after_seconds": [], "faults": ["no verdict"]
        }  # fmt: skip
        if found["faults"]:
            print(f"{trial}: {'; '.join(found['faults'])}", flush=True)
        return {**dataclasses.asdict(trial), **found}

    trials = [drawn(options.first_seed + number) for number in range(options.trials)]
    told = {"environment": describe_environment(), "is_blind": options.blind}
    rows = run_all(trials, run, options.at_once, options.out / "results.json", told)
    print(summary(rows))
    return int(any(row["faults"] for row in rows))


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return what became of all trials, in a few lines."""
    lines = [f"{sum(not row['faults'] for row in rows)} of {len(rows)} right"]
    for rate in ("none", "100mbit", "10mbit"):
        for when in ("starting", "training"):
            mine = [row for row in rows if (row["rate"], row["while"]) == (rate, when)]
            if seconds := [max(row["named_after_seconds"]) for row in mine if row["named_after_seconds"]]:
                lines.append(
                    f"  {rate}, {when}: {len(mine)} kills, named by the last rank after "
                    f"{statistics.median(seconds):.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
