"""What this process may use of the machine it runs on."""

import os
import platform
from collections.abc import Collection, Iterable
from pathlib import Path


def usable_cores() -> set[int]:
    """Return the numbers of the cores that this process may run on.

    A launcher, a container or `taskset` may have left it a part of the machine's. Where the system binds no process, it
    is all of them.
    """
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def share_of_cores(own: Collection[int], of_all: Iterable[Collection[int]]) -> float:
    """Return the cores of one rank of a machine: each core is divided among the ranks that may use it.

    Args:
        own: The cores that this rank may use.
        of_all: The same of every rank of the machine, this one among them.
    """
    ranks = [frozenset(cores) for cores in of_all]
    return sum(1 / max(1, sum(core in cores for cores in ranks)) for core in own)


def processor_name() -> str:
    """Return the name of the processor."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
