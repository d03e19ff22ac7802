"""The environment variables that launchers set for every rank, and the process group of these ranks.

| variables | of torchrun and its like | of srun |
|---|---|---|
| rank, ranks | `RANK`, `WORLD_SIZE` | `SLURM_PROCID`, `SLURM_STEP_NUM_TASKS` |
| the same among the ranks of a node | `LOCAL_RANK`, `LOCAL_WORLD_SIZE` | `SLURM_LOCALID`, `SLURM_STEP_TASKS_PER_NODE` |
| the node | `GROUP_RANK` | `SLURM_NODEID` |
| where rank 0 listens | `MASTER_ADDR`, `MASTER_PORT` | the same, set by the batch script |
"""

import dataclasses
import os
import socket
from collections.abc import Mapping

import torch
from torch import distributed as dist

from stretto.errors import CommunicationError, ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LaunchedRank:
    """The number of a process's rank under a launcher."""

    rank: int
    """This rank, from 0."""
    world_size: int
    """Number of ranks."""
    local_rank: int
    """Position among the ranks of this node."""
    local_world_size: int
    """Number of ranks on this node."""


def launched_rank(variables: Mapping[str, str]) -> LaunchedRank | None:
    """Return this process's rank under a launcher; None without a launcher, or under srun with one task.

    torchrun counts before srun, which may have started it.

    Raises:
        ConfigError: A variable is not a number.
    """
    try:
        if "RANK" in variables and "WORLD_SIZE" in variables:
            return LaunchedRank(
                rank=int(variables["RANK"]),
                world_size=int(variables["WORLD_SIZE"]),
                local_rank=int(variables.get("LOCAL_RANK", "0")),
                local_world_size=int(variables.get("LOCAL_WORLD_SIZE", "1")),
            )
        if int(variables.get("SLURM_STEP_NUM_TASKS", "1")) < 2:  # also in every shell that srun has opened
            return None
        tasks = _tasks_per_node(variables["SLURM_STEP_TASKS_PER_NODE"])
        return LaunchedRank(
            rank=int(variables["SLURM_PROCID"]),
            world_size=int(variables["SLURM_STEP_NUM_TASKS"]),
            local_rank=int(variables["SLURM_LOCALID"]),
            local_world_size=tasks[int(variables["SLURM_NODEID"])],
        )
    except (KeyError, ValueError, IndexError) as error:
        raise ConfigError(
            f"the variables of a launcher do not fit ({error}): expected RANK and WORLD_SIZE, or those of srun, as "
            "numbers; unset them where no launcher has started this process"
        ) from error


def launched_per_node() -> int:
    """Return how many ranks a launcher has started on this machine; 1 without a launcher.

    Raises:
        ConfigError: Its variables contradict each other.
    """
    launched = launched_rank(os.environ)
    return 1 if launched is None else launched.local_world_size


def own_machine() -> str:
    """Return a name that is equal for all processes that fail together: the host and the launcher's agent."""
    node = os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID", ""))
    return f"{socket.gethostname()} {node}".rstrip()


def own_rank() -> int:
    """Return this process's rank in the default group, or else under a launcher; 0 for a single process.

    Raises:
        ConfigError: The variables of a launcher do not fit.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    launched = launched_rank(os.environ)
    return 0 if launched is None else launched.rank


def local_device() -> torch.device:
    """Return the device of this rank, made the current one: under torchrun, srun, or alone.

    Ranks of a node use its CUDA devices in order. If a launcher shows each rank only one device, the rank uses that;
    without a CUDA device it uses the CPU.

    Raises:
        ConfigError: The node has CUDA devices, but fewer than ranks; or a launcher's variables do not fit.
    """
    found = torch.cuda.device_count()
    if not found:
        return torch.device("cpu")
    launched = launched_rank(os.environ)
    local_rank, ranks = (0, 1) if launched is None else (launched.local_rank, launched.local_world_size)
    if found == 1 and ranks > 1:
        local_rank = 0 if _shows_one(os.environ) else local_rank
    if local_rank >= found:
        raise ConfigError(
            f"rank {0 if launched is None else launched.rank}: number {local_rank} of {ranks} ranks of this node, and "
            f"PyTorch finds {found} CUDA devices: expected one for each; start fewer ranks per node"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _shows_one(variables: Mapping[str, str]) -> bool:
    """Return whether only a single device is visible to this process."""
    return variables.get("CUDA_VISIBLE_DEVICES", "").count(",") == 0 and "CUDA_VISIBLE_DEVICES" in variables


def told_place(rank: int | None, ranks: int | None) -> tuple[int, int]:
    """Return the given rank and number of ranks, or else those from a launcher.

    Raises:
        ConfigError: Neither gives them.
    """
    launched = launched_rank(os.environ)
    if launched is not None:
        rank = launched.rank if rank is None else rank
        ranks = launched.world_size if ranks is None else ranks
    if rank is None or ranks is None or not 0 <= rank < ranks:
        raise ConfigError(
            f"rank={rank}, ranks={ranks}: expected the place of this process, from 0, and the number of "
            "processes; or a launcher that sets both"
        )
    return rank, ranks


def announce_rank(rank: int, world_size: int) -> None:
    """Set torchrun's variables in this process, for a library that reads only these.

    Without a launcher, all ranks are on this machine.

    Args:
        rank: Rank of this process, from 0.
        world_size: Number of ranks.

    Raises:
        ConfigError: The variables of a launcher do not fit.
    """
    alone = LaunchedRank(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
    launched = launched_rank(os.environ) or alone
    for field in dataclasses.fields(LaunchedRank):
        os.environ[field.name.upper()] = str(getattr(launched, field.name))


def _tasks_per_node(text: str) -> list[int]:
    """Read srun's form `2(x3),1`: three nodes with two tasks each and one node with one."""
    counts: list[int] = []
    for part in text.split(","):
        tasks, _, times = part.rstrip(")").partition("(x")
        counts += [int(tasks)] * int(times or 1)
    return counts


def meeting_point(rank: LaunchedRank, variables: Mapping[str, str]) -> tuple[str, int]:
    """Return the address and port where the ranks of a launcher meet.

    Raises:
        ConfigError: The launcher does not give it, or would send restarted ranks to an old store.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in variables]
    if missing:
        raise ConfigError(
            f"rank {rank.rank} of {rank.world_size}, started by a launcher: {' and '.join(missing)} not set: "
            "expected the address and port at which rank 0 listens; torchrun sets both, a Slurm script exports them"
        )
    if is_hosted_by_agent(variables) and variables.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise ConfigError(
            "torchrun --max-restarts restarts ranks on the old store, which still has the addresses and last "
            "messages of the ranks before: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before torchrun, and "
            "every start has a new store"
        )
    try:
        return variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
    except ValueError as error:
        raise ConfigError(
            f"MASTER_PORT={variables['MASTER_PORT']!r}: expected the number of a port"
        ) from error


def is_hosted_by_agent(variables: Mapping[str, str]) -> bool:
    """Return whether an agent of torchrun hosts the store; otherwise rank 0 does."""
    return variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def join_launched_group(device: torch.device) -> None:
    """Make the default process group, if a launcher has started this process as one of several ranks.

    It does nothing if there is a default group or no launcher.

    Args:
        device: Device of the model: NCCL for CUDA, otherwise Gloo.

    Raises:
        ConfigError: The launcher's variables are incomplete.
        CommunicationError: The ranks did not connect.
    """
    if not dist.is_available() or dist.is_initialized():
        return
    launched = launched_rank(os.environ)
    if launched is None or launched.world_size < 2:
        return
    host, port = meeting_point(launched, os.environ)
    try:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method="env://",
            rank=launched.rank,
            world_size=launched.world_size,
        )
    except (RuntimeError, ValueError) as error:
        raise CommunicationError(
            f"rank {launched.rank} of {launched.world_size}: the ranks did not meet at {host}:{port}: {error}"
        ) from error
