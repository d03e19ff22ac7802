"""How fast digests read memory, beside memory itself and other checksums.

    python benchmarks/digests.py --out benchmarks/results/DATE-digests

One thread, one process. All ways read the same values in turns, and every turn begins with another way. A rate is the
bytes of the values over the seconds. A share is taken within a turn, against `sum`: one pass over the values as 64-bit
words, the least that can depend on all of them. `copy` writes as many bytes as it reads.
"""

import argparse
import collections
import hashlib
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from stretto.checksums import Checksum, Sums, digest
from stretto.machine import describe_environment
from stretto_lab.observe import replace_json

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MEBIBYTES = (0.25, 4, 64, 256)
"""Sizes of the values: within the cache of a core, within that of a processor, and beyond both."""
TENSORS = 16
"""Number of tensors that hold the values, as parameters do in a model; most ways are called once per tensor."""
SMALLEST_SECONDS = 0.02
"""Length of one timing: small values are read several times."""


def sha1(tensor: Tensor) -> bytes:
    """Return the digest that Megatron-LM compares replicas by: SHA-1 of one parameter, in fp32, on the CPU."""
    return hashlib.sha1(tensor.detach().to("cpu", torch.float32).numpy().view("uint8").data).digest()


BY_TENSOR: dict[str, Callable[[Tensor], object]] = {
    "sum": lambda tensor: tensor.view(torch.int64).sum(),
    "digest": digest,
    "sums": Sums.of,
    "checksum": Checksum.of,
    "SHA-1": sha1,
    "hash_tensor": torch.hash_tensor,
}
"""`sums` are those of rows and columns. `checksum` is these and a digest: what `AtRest` takes of every tensor at every
update."""


def measure(values: list[Tensor], seconds: float) -> dict[str, list[float]]:
    """Return the seconds that every way takes for all values, by turn, for about `seconds`."""
    targets = [torch.empty_like(value) for value in values]
    ways: dict[str, Callable[[], object]] = {"copy": lambda: torch._foreach_copy_(targets, values)}
    ways |= {name: partial(read, way, values) for name, way in BY_TENSOR.items()}
    return in_turns(ways, seconds)


def in_turns(ways: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """Return the seconds that every way takes, by turn, for about `seconds`; every turn begins with another way."""
    calls = {name: repeats_of(way) for name, way in ways.items()}
    order = collections.deque(ways)
    found: dict[str, list[float]] = {name: [] for name in ways}
    started, turn = time.perf_counter(), 0
    while turn < 3 or time.perf_counter() - started < seconds:
        for name in order:
            begun = time.perf_counter()
            for _ in range(calls[name]):
                ways[name]()
            synchronize()
            found[name].append((time.perf_counter() - begun) / calls[name])
        turn += 1
        order.rotate(-1)
    return found


def read(way: Callable[[Tensor], object], values: list[Tensor]) -> None:
    """Let a way that works by tensor read all values."""
    for value in values:
        way(value)


def synchronize() -> None:
    """Wait for a device that works."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def repeats_of(way: Callable[[], object]) -> int:
    """Return how often the values have to be read for a timing to be long enough."""
    way()
    synchronize()
    begun = time.perf_counter()
    way()
    synchronize()
    return max(1, round(SMALLEST_SECONDS / (time.perf_counter() - begun)))


def rows(found: dict[str, list[float]], num_bytes: int) -> dict[str, dict[str, float]]:
    """Return every way's rate, and its share of the rate of `sum`: medians, and quartiles of the share."""
    table = {}
    for name, seconds in found.items():
        shares = [least / taken for taken, least in zip(seconds, found["sum"], strict=True)]
        low, median, high = statistics.quantiles(shares, n=4)
        rate = num_bytes / statistics.median(seconds) / 1e9
        table[name] = {
            "turns": len(shares),
            "gigabytes_per_second": rate,
            "share": median,
            "low": low,
            "high": high,
        }
    return table


def main() -> None:
    """Measure all sizes and dtypes and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="length of the measurement of one size and dtype"
    )
    parser.add_argument("--mebibytes", type=float, nargs="+", default=MEBIBYTES)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: where the values lie")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.set_num_threads(1)
    results = []
    for size in options.mebibytes:
        for dtype in DTYPES:
            elements = int(size * 2**20) // TENSORS // DTYPES[dtype].itemsize
            generator = torch.Generator().manual_seed(0)
            values = [
                torch.randn(elements, generator=generator).to(device, DTYPES[dtype]) for _ in range(TENSORS)
            ]
            table = rows(measure(values, options.seconds), TENSORS * elements * DTYPES[dtype].itemsize)
            results.append({"mebibytes": size, "dtype": dtype, "tensors": TENSORS, "ways": table})
            for name, row in table.items():
                print(
                    f"{size:6g} MiB {dtype}  {name:12} {row['gigabytes_per_second']:7.2f} GB/s  {row['share']:6.2f} "
                    f"of sum ({row['low']:.2f} to {row['high']:.2f}, quartiles of {row['turns']} turns)",
                    flush=True,
                )
    replace_json(
        options.out / "digests.json", {"environment": describe_environment(device), "results": results}
    )


if __name__ == "__main__":
    main()
