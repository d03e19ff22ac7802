"""The machine of this process: the cores and memory it may use or has used, and a description."""

import os
import platform
import resource
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch

_CPU = torch.device("cpu")


def usable_cores() -> set[int]:
    """Return the numbers of the cores that this process may run on.

    A launcher, a container or `taskset` may have restricted it to some cores. On systems that cannot bind processes it
    is all cores.
    """
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def share_of_cores(own: Collection[int], of_all: Iterable[Collection[int]]) -> float:
    """Return the number of cores of one rank: each core is divided among the ranks that may use it.

    Args:
        own: The cores that this rank may use.
        of_all: The cores of every rank of the machine, including this rank.
    """
    ranks = [frozenset(cores) for cores in of_all]
    return sum(1 / max(1, sum(core in cores for cores in ranks)) for core in own)


def processor_name() -> str:
    """Return the name of the processor."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def peak_resident_bytes() -> int:
    """Return the largest resident memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def most_bytes(device: torch.device) -> int:
    """Return the largest memory so far on the model's device: allocated on a GPU, resident on the host."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()


def describe_environment(device: torch.device = _CPU) -> dict[str, Any]:
    """Return versions, processor, device and commit.

    Args:
        device: The model's device. The entry `cuda` is its name, or None on CPUs even if the machine has GPUs. The
            commit is None if the sources are not a git checkout.
    """
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "cuda": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "commit": _commit(),
    }


def _commit() -> str | None:
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):  # no git, or sources that were installed from a package
        return None
    return found.stdout.strip()
