"""What one rank spends, by the number of ranks: messages, their sizes, reports and calls and bytes of the store.

    python benchmarks/ranks.py --out benchmarks/results/DATE-ranks

Messages, buckets and reports are computed by the functions that a job computes them with, for `zero1`. What a rank asks
of the store is counted: all ranks, in one process, start on one store, hear of a failure and end.
"""

import argparse
import collections
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from stretto.engine.report import record_dtype
from stretto.engine.watcher import Watcher
from stretto.exchange import WIRES
from stretto.flat import bucket_bytes_among, usual_bucket_bytes
from stretto_lab.observe import replace_json

RANKS = (2, 8, 32, 128, 512, 1024)
PARAMETERS = 125_000_000
TENSORS = 150
"""Of a model of that size."""
MOST_IN_STORE = 128
"""More ranks are not counted: each is a thread here."""
NEVER = 600.0


class Counted:
    """A store of all ranks that counts the calls of one, and the bytes that it writes."""

    def __init__(self, store: dist.Store) -> None:
        self.calls: collections.Counter[str] = collections.Counter()
        self.written = 0
        self._store = store

    def clone(self) -> "Counted":
        """Return itself: every rank has its own."""
        return self

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            self.written += sum(map(len, arguments)) if name in ("set", "append") else 0
            return method(*arguments)

        return call


def of_store(ranks: int) -> dict[str, float]:
    """Return what the last rank writes, and its calls per look; it starts, hears of a failure and ends."""
    shared = dist.PrefixStore("stretto", dist.HashStore())
    stores = [Counted(shared) for _ in range(ranks)]
    watchers = [
        Watcher(store, range(ranks), rank, rank == 0, "127.0.0.1", NEVER, ())  # type: ignore[arg-type]  # it counts
        for rank, store in enumerate(stores)
    ]
    watchers[0].say("failure", "rank 0: ValueError: planted", NEVER)
    for watcher in watchers[1:]:
        watcher.look(NEVER)
        watcher.heard("failure")
    for watcher in watchers:
        watcher.end()
    looks, last = watchers[-1].answers, stores[-1]
    return {"store_bytes": last.written, "store_calls_per_look": round(last.calls.total() / max(1, looks), 1)}


def of_exchange(ranks: int, wire: str) -> dict[str, float]:
    """Return messages of a rank's update under `zero1`, in the sizes that the layout chooses."""
    sent_bytes = int(PARAMETERS * min(4.0, WIRES[wire].bytes_per_value))
    bucket = bucket_bytes_among(ranks, usual_bucket_bytes(torch.device("cpu")), 4 * PARAMETERS, sent_bytes)
    buckets = -(-4 * PARAMETERS // bucket)
    return {
        "bucket_mib": round(bucket / 2**20, 2),
        "messages": 2 * buckets * (ranks - 1),
        "message_kib": round(sent_bytes / buckets / ranks / 2**10, 1),
        "sent_mb": round(2 * sent_bytes * (ranks - 1) / ranks / 1e6, 1),
    }


def main() -> None:
    """Print and write a row for each number of ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    rows = []
    out = parser.parse_args().out
    for ranks in RANKS:
        row: dict[str, Any] = {
            "ranks": ranks,
            **{wire: of_exchange(ranks, wire) for wire in ("fp32", "rotated2")},
        }
        row["report_bytes"] = record_dtype(TENSORS, 0).itemsize * (ranks - 1)
        rows.append(row | (of_store(ranks) if ranks <= MOST_IN_STORE else {}))
        print(rows[-1], flush=True)
    replace_json(out / "ranks.json", {"parameters": PARAMETERS, "tensors": TENSORS, "rows": rows})


if __name__ == "__main__":
    main()
