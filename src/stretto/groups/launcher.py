"""Joins the process group of a launcher: torchrun, srun and their like tell every rank by environment variables.

| variable | of torchrun | of srun |
|---|---|---|
| rank, ranks | `RANK`, `WORLD_SIZE` | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` |
| where rank 0 listens | `MASTER_ADDR`, `MASTER_PORT` | the same, set by the batch script |
"""

import os

import torch
from torch import distributed as dist

from stretto.errors import CommunicationError, ConfigError


def join_launched_group(device: torch.device) -> None:
    """Make the default process group, where a launcher has started this process as one of several ranks.

    Nothing happens where there is a default group, or no launcher.

    Args:
        device: Where the model lives: NCCL on CUDA, Gloo elsewhere.

    Raises:
        ConfigError: The launcher does not say where rank 0 listens.
        CommunicationError: The ranks did not find each other.
    """
    if not dist.is_available() or dist.is_initialized():
        return
    environment = os.environ
    rank = environment.get("RANK", environment.get("SLURM_PROCID"))
    world_size = environment.get("WORLD_SIZE", environment.get("SLURM_STEP_NUM_TASKS"))
    if rank is None or world_size is None or int(world_size) < 2:
        return
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise ConfigError(
            f"rank {rank} of {world_size}, started by a launcher: {' and '.join(missing)} not set: expected the "
            "address and port at which rank 0 listens; torchrun sets both, a Slurm script exports them"
        )
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method="env://",
            rank=int(rank),
            world_size=int(world_size),
        )
    except (RuntimeError, ValueError) as error:
        raise CommunicationError(
            f"rank {rank} of {world_size}: the ranks did not meet at "
            f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}: {error}"
        ) from error
