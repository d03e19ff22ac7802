"""What a measurement depends on beside its settings."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def describe_environment() -> dict[str, Any]:
    """Return versions, processor and commit; the commit is None where the sources are not a git checkout."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": _commit(),
    }


def processor_name() -> str:
    """Return what the host's processor is called."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


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
