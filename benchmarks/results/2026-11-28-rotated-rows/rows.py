"""Processor time to pack a bucket of 1 MiB for N ranks, and to read it from N ranks, on one core, beside a copy.

    python rows.py NAME [WIRE ...] >> rows.jsonl

NAME says which library PYTHONPATH has; with an empty PATH there is no C compiler. Medians of processor seconds.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from stretto.exchange import WIRES
from stretto.exchange import wire as contract

TURNS = 9


def milliseconds(work: Callable[[], object], repeats: int = 3) -> float:
    taken = []
    for _ in range(repeats):
        started = time.process_time()
        work()
        taken.append(1e3 * (time.process_time() - started))
    return min(taken)


def works(name: str, ranks: int, values: Tensor, content: Tensor) -> tuple[Callable[[], object], ...]:
    wire, rows = WIRES[name].of(torch.float32), values.view(ranks, -1)
    if hasattr(contract, "write_rows"):  # before
        drawn = wire.drawn("sums", 1, 0)
        return (
            lambda: contract.write_rows(drawn, rows, content),
            lambda: contract.read_rows(wire, content, "sums", 1, range(ranks)),
        )
    return (
        lambda: wire.drawn("sums", 1, *[0] * ranks).write(values, content),
        lambda: wire.drawn("sums", 1, *range(ranks)).read(content),
    )


def main() -> None:
    torch.set_num_threads(1)
    library, *names = sys.argv[1:]
    large, copied = torch.randn(2**24), torch.empty(2**24)
    cases = {}
    for name in names or ["int4", "rotated2"]:
        for ranks in (1, 2, 8, 32, 128, 256, 512, 1024):
            values = torch.randn(2**18)
            content = torch.empty(WIRES[name].num_bytes(2**18), dtype=torch.uint8)
            cases[name, ranks] = works(name, ranks, values, content)
            for work in cases[name, ranks]:
                work()
    copies, taken = [], {case: ([], []) for case in cases}
    for _ in range(TURNS):  # all cases in turns
        copies.append(milliseconds(lambda: copied.copy_(large)) / 64)
        for case, both in cases.items():
            for found, work in zip(taken[case], both, strict=True):
                found.append(milliseconds(work, 1))
    copy = statistics.median(copies)
    for (name, ranks), both in taken.items():
        pack, read = (statistics.median(one) for one in both)
        print(json.dumps({
            "library": library, "wire": name, "ranks": ranks, "pack_ms": round(pack, 3), "read_ms": round(read, 3),
            "copy_ms": round(copy, 4), "pack_copies": round(pack / copy, 1), "read_copies": round(read / copy, 1),
            "load": round(os.getloadavg()[0], 1),
        }))  # fmt: skip


if __name__ == "__main__":
    main()
