"""The rate of a link as an all-reduce sees it: bits of payload that a rank sends, over the median time.

python benchmarks/namespaces.py --rate 100mbit -- python benchmarks/link_rate.py
torchrun --nproc-per-node 2 benchmarks/link_rate.py --link 100mbit
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist

from stretto.groups import Link, register_throttled
from stretto.groups.collectives import all_reduce


def seconds_of_all_reduces(num_bytes: int, repeats: int) -> list[float]:
    """Time all-reduces of `num_bytes` bytes, after one that opens the connections."""
    tensor = torch.zeros(num_bytes // 4)
    dist.all_reduce(tensor)
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        seconds.append(time.perf_counter() - begin)
    return seconds


def main() -> None:
    """Measure, and let rank 0 print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--link", default="none", help="of a throttled group; 'none' measures the real network"
    )
    parser.add_argument(
        "--megabytes", type=float, default=8.0, help="size of the all-reduced vector, in 10^6 bytes"
    )
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    register_throttled(Link.parse(options.link))
    dist.init_process_group("throttled")
    num_bytes = int(options.megabytes * 1e6)
    seconds = seconds_of_all_reduces(num_bytes, options.repeats)
    if dist.get_rank() == 0:
        sent = all_reduce(num_bytes, dist.get_world_size())
        rates = sorted(8e-6 * sent / one for one in seconds)
        print(
            f"{dist.get_world_size()} ranks, all-reduce of {num_bytes:,} bytes, {sent:,} sent by a rank: "
            f"{statistics.median(seconds):.4f} s, {statistics.median(rates):.1f} Mbit/s "
            f"({rates[0]:.1f} to {rates[-1]:.1f} over {options.repeats})"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
