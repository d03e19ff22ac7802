"""What it costs to keep states in memory, at the interval that the library chooses: time and bytes.

Three ranks of one machine train for a while under `stretto.survives`. Of every keeping the time is measured, in which
the rank does not train, and the bytes that it sends, by the job's own ledger. Beside it stands what copying and hashing
as many bytes takes, on all ranks at once.

    python benchmarks/copies.py --out benchmarks/results/DATE-copies
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import xxhash
from recovery import RANKS, loss_of, network
from torch.distributed import TCPStore

import stretto as st
from stretto.machine import describe_environment
from stretto_lab.observe import replace_json
from stretto_lab.train.workers import host_store

STRATEGIES = {"zero1": st.ZeRO1, "acco": st.ACCO, "diloco": st.DiLoCo}


def work(rank: int, port: int, width: int, strategy: str, seconds: float, out: Path) -> None:
    """Train for some seconds, and write what keeping states took."""
    torch.set_num_threads(1)
    model = network(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draws = torch.Generator().manual_seed(rank)
    kept: list[dict[str, Any]] = []

    def train(term: st.Term) -> dict[str, Any]:
        handing_over = 0.0
        parallel = st.DataParallel(
            model, optimizer, STRATEGIES[strategy](), micro_batches=2, group=term.group
        )
        term.go_on(parallel)
        began, ends = time.perf_counter(), time.perf_counter() + seconds
        with parallel:
            for _ in parallel.feed(iter(int, 1)):
                update = parallel.backward(loss_of(model, draws))
                if update is None:
                    continue
                before, at = parallel.sent_bytes, time.perf_counter()
                term.keep(parallel)
                took = time.perf_counter() - at
                if parallel.sent_bytes > before:
                    kept.append(
                        {"update": update.step, "seconds": took, "bytes": parallel.sent_bytes - before}
                    )
                elif kept:
                    handing_over += took
                if time.perf_counter() > ends:
                    parallel.stop()
            total = time.perf_counter() - began
            parallel.finish()
        return {
            "seconds": total,
            "updates": parallel.steps,
            "sent_bytes": parallel.sent_bytes,
            "kept": kept,
            "handing_over_seconds": handing_over,
            "copy_and_digest_seconds": statistics.median(
                copied_and_hashed(kept[-1]["bytes"]) for _ in range(5)
            ),
        }

    store = TCPStore("127.0.0.1", port, is_master=False)
    told = st.survives(train, store=store, rank=rank, ranks=RANKS)
    (out / f"{rank}.json").write_text(json.dumps(told))


def copied_and_hashed(num_bytes: int) -> float:
    """Return the seconds that a copy and a digest of so many bytes take."""
    content = bytes(num_bytes)
    began = time.perf_counter()
    xxhash.xxh3_128_hexdigest(bytearray(content))
    return time.perf_counter() - began


def measure(width: int, strategy: str, seconds: float, out: Path) -> dict[str, Any]:
    """Return what the slowest rank has spent on all states that were kept after the first one."""
    folder = out / f"{strategy}-{width}"
    folder.mkdir(parents=True, exist_ok=True)
    store = host_store("127.0.0.1", 0)
    mp.spawn(work, (store.port, width, strategy, seconds, folder), nprocs=RANKS)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    steps = [one["update"] for one in ranks[0]["kept"]]
    each = [statistics.median(one["seconds"] for one in told["kept"]) for told in ranks]
    num_bytes = ranks[0]["kept"][-1]["bytes"]
    return {
        "strategy": strategy,
        "parameters": sum(one.numel() for one in network(width).parameters()),
        "update_seconds": ranks[0]["seconds"] / ranks[0]["updates"],
        "kept_at": steps,
        "keep_seconds": max(each),
        "copy_and_digest_seconds": max(told["copy_and_digest_seconds"] for told in ranks),
        "bytes": num_bytes,
        "handing_over_seconds": max(told["handing_over_seconds"] / len(told["kept"]) for told in ranks),
        "share_of_time": max(
            (told["handing_over_seconds"] + sum(one["seconds"] for one in told["kept"])) / told["seconds"]
            for told in ranks
        ),
        "share_of_bytes": max(
            sum(one["bytes"] for one in told["kept"]) / told["sent_bytes"] for told in ranks
        ),
    }


def main(words: Sequence[str] | None = None) -> None:
    """Measure every strategy at every size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--widths",
        type=int,
        nargs="+",
        default=[128, 1000, 3000],
        help="each model has about the square of it in parameters",
    )
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(words)
    rows = []
    for width in options.widths:
        for strategy in options.strategies:
            rows.append(measure(width, strategy, options.seconds, options.out))
            print(rows[-1], flush=True)
            replace_json(options.out / "results.json", {"environment": describe_environment(), "rows": rows})


if __name__ == "__main__":
    main()
