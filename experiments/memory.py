"""Bytes per parameter by strategy: peak resident memory of training, against the ledger plus stated constants.

Every measurement runs in fresh processes. The baseline is taken after a small job of the same kind, so that it
includes libraries, threads and connections. The peak is the kernel's, over building, wrapping and training. Linux only.

    python experiments/memory.py --out benchmarks/results/DATE-memory
"""

import argparse
import dataclasses
import os
import sys
import tempfile
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import stretto as st
from stretto.exchange.exchange import IN_FLIGHT
from stretto.flat import usual_bucket_bytes
from stretto.machine import describe_environment
from stretto.strategies import STRATEGIES, strategy_by_name
from stretto.strategies.ledger import ledger_of
from stretto_lab.observe import replace_json

UPDATES = 2
MICRO_BATCHES = 2


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row of the table."""

    strategy: str
    dtype: str
    """float32, or bfloat16 with gradients that accumulate in 16 bits too."""
    world_size: int
    width: int
    layers: int
    bucket_bytes: int

    @property
    def num_parameters(self) -> int:
        """Every layer is a square matrix."""
        return self.layers * self.width**2

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of parameters and gradients."""
        return getattr(torch, self.dtype)


def predicted_bytes(setting: Setting) -> float:
    """Return what the ledger says that one rank holds."""
    strategy = strategy_by_name(setting.strategy)
    itemsize = setting.torch_dtype.itemsize
    per_parameter = ledger_of(strategy).memory_bytes(
        strategy, parameter=itemsize, accumulation=itemsize, world_size=setting.world_size
    )
    return per_parameter * setting.num_parameters


def constant_bytes(setting: Setting) -> dict[str, int]:
    """Return what a rank holds besides; it does not grow with the model."""
    ledger = ledger_of(strategy_by_name(setting.strategy))
    itemsize = setting.torch_dtype.itemsize
    bucket = min(setting.bucket_bytes // itemsize, setting.num_parameters)
    owned = bucket // setting.world_size
    flying = min(IN_FLIGHT, -(-setting.num_parameters // bucket))
    constants = {
        "buckets received": flying * bucket * itemsize,
        "the gradient of one layer, before it is added": setting.width**2 * itemsize,
    }
    if ledger.replicated:
        constants["slices summed"] = flying * owned * 4
        if itemsize < 4:
            constants["slices and buckets of sums on the wire"] = flying * (owned + bucket) * itemsize
    else:
        constants["slices sent"] = flying * owned * itemsize
    if ledger.previews:
        # A preview before the step divides a copy of the sums; after the step they are a mean already. The copy of the
        # masters is also what is sent, unless that is narrower.
        copies = 2 + (ledger.rounds > 1) + (itemsize < 4)
        constants["copies of a segment's moments, mean and masters, for a preview"] = copies * owned * 4
    return constants


def train(setting: Setting, width: int, layers: int) -> st.DataParallel:
    """Train a few updates and return the job, alive."""
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)])
    model.to(setting.torch_dtype)
    # The fused optimizer has no temporaries; foreach adds one of all owned moments, the loop two of a segment.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    options = st.Options(
        bucket_bytes=setting.bucket_bytes,
        accumulate="fp32" if setting.dtype == "float32" else "parameter",
    )
    strategy = strategy_by_name(setting.strategy)
    job = st.DataParallel(model, optimizer, strategy, micro_batches=MICRO_BATCHES, options=options)
    x = torch.randn(8, width, dtype=setting.torch_dtype)
    while job.steps < UPDATES:
        job.backward(model(x).square().mean())
    return job


def measure(rank: int, setting: Setting, store: str, results: Any) -> None:
    """Put this rank's peak over its baseline, in bytes, into `results`."""
    torch.set_num_threads(1)
    if setting.world_size > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", store=dist.FileStore(store), rank=rank, world_size=setting.world_size)
    train(setting, width=64, layers=2).finish()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    baseline = resident("VmRSS")
    job = train(setting, setting.width, setting.layers)
    results.put(resident("VmHWM") - baseline)
    job.finish()
    if dist.is_initialized():
        dist.destroy_process_group()


def resident(field: str) -> int:
    """Return a field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kibibytes = next(line for line in lines if line.startswith(f"{field}:")).split()[1]
    return int(kibibytes) * 1024


def peak_bytes(setting: Setting) -> int:
    """Return the largest peak of all ranks."""
    context = get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (setting, f"{folder}/store", results)
        ranks = [context.Process(target=measure, args=(r, *arguments)) for r in range(setting.world_size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            sys.exit(f"{setting}: a rank failed")
    return max(results.get() for _ in ranks)


def row(setting: Setting) -> dict[str, Any]:
    """Measure one setting."""
    constants = constant_bytes(setting)
    predicted, peak = predicted_bytes(setting), peak_bytes(setting)
    return {
        **dataclasses.asdict(setting),
        "parameters": setting.num_parameters,
        "ledger_bytes_per_parameter": predicted / setting.num_parameters,
        "constant_bytes": constants,
        "peak_bytes": peak,
        "peak_without_constants_per_parameter": (peak - sum(constants.values())) / setting.num_parameters,
        "relative_error": peak / (predicted + sum(constants.values())) - 1,
    }


def settings(options: argparse.Namespace) -> list[Setting]:
    """Return the rows of the table."""
    return [
        Setting(strategy, dtype, world_size, options.width, options.layers, options.bucket_bytes)
        for dtype in ("float32", "bfloat16")
        for world_size in (1, 2)
        for strategy in options.strategies.split(",")
    ]


def main() -> None:
    """Measure all settings, write `memory.json` and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for memory.json")
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--width", type=int, default=1024, help="of a layer, a square matrix")
    parser.add_argument("--layers", type=int, default=52)
    parser.add_argument("--bucket-bytes", type=int, default=usual_bucket_bytes(torch.device("cpu")))
    options = parser.parse_args()
    # Otherwise glibc keeps freed blocks of up to 32 MiB, and the peak shows its policy.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**18)
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    print("strategy  dtype     ranks  ledger B/param  peak - constants  constants MiB  error")
    for setting in settings(options):
        rows.append(found := row(setting))
        print(
            f"{setting.strategy:9} {setting.dtype:9} {setting.world_size:5}"
            f"  {found['ledger_bytes_per_parameter']:14.2f}"
            f"  {found['peak_without_constants_per_parameter']:16.2f}"
            f"  {sum(found['constant_bytes'].values()) / 2**20:13.1f}  {found['relative_error']:+6.1%}",
            flush=True,
        )
    report = {"command": sys.argv, "environment": describe_environment(), "runs": rows}
    replace_json(options.out / "memory.json", report)


if __name__ == "__main__":
    main()
