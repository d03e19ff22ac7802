"""Sharding inside nodes: FSDP2 shards the model, and the strategy trains across nodes (docs/sharded.md)."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from stretto.engine.options import BufferChoices
from stretto.errors import ConfigError
from stretto.flat import is_dtensor
from stretto.survive import Term
from stretto_lab.recipes import Task
from stretto_lab.train.configuration import Job, TaskT

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def placed(task: Task, job: Job[TaskT], device: torch.device, term: Term | None = None) -> Any:
    """Move the model of a task to its device, and shard it inside nodes if the job says so.

    FSDP2 gathers one unit at a time: each member of the outermost `nn.ModuleList`s (the layers of a transformer), and
    the rest of the model. All ranks of the default group, or of the term, must call it.

    Args:
        task: A task that has not trained; its optimizer gets the shards instead of the parameters.
        job: It gives the number of ranks that hold one model.
        device: The device of this rank.
        term: The membership, if the job survives lost ranks.

    Returns:
        A mesh with the dimensions `node` and `shard`, or None if every rank holds a whole model.

    Raises:
        ConfigError: The model has batch normalisation, whose statistics are not averaged inside a node.
    """
    model = task.model
    if job.shard == 1:
        model.to(device)
        return None
    from torch.distributed.device_mesh import init_device_mesh  # with FSDP2 half a second to import

    choices = BufferChoices.read(job.buffers)
    if any(choices.of(name) != "alone" for name in _running_statistics(model)):
        raise ConfigError(
            f"shard={job.shard}: the model has batch normalisation, whose running statistics Stretto does not "
            "average inside a node: expected shard=1, a model without it, or buffers='*=alone', which keeps "
            "separate statistics on each rank"
        )
    mesh: Any
    if term is not None:
        mesh = term.meshes(device.type)
    else:
        shape = (dist.get_world_size() // job.shard, job.shard)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("node", "shard"))
    cut(task, mesh["shard"], device)
    return mesh


def cut(task: Task, mesh: Any, device: torch.device) -> None:
    """Let FSDP2 shard the model of a task over `mesh`, on `device`, and give its optimizer the shards; see `placed`."""
    from torch.distributed.fsdp import fully_shard

    names = {parameter: name for name, parameter in task.model.named_parameters()}
    for unit in (*_units(task.model), task.model):
        fully_shard(unit, mesh=mesh)  # moves to the device what it cuts
    task.model.to(device)
    shards = dict(task.model.named_parameters())
    for group in task.optimizer.param_groups:
        group["params"] = [shards[names[parameter]] for parameter in group["params"]]


def _units(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from child if isinstance(child, nn.ModuleList) else _units(child)


def _running_statistics(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, _NORMS) and module.track_running_stats:
            yield from (f"{name}.running_mean", f"{name}.running_var")


def whole_state(model: nn.Module, *, keeps: bool) -> dict[str, Tensor]:
    """Return `model.state_dict()` with whole tensors; a sharded model gathers them one after the other.

    If the model is sharded, all ranks of a node must call it. Ranks that keep the tensors get them in CPU memory.

    Args:
        model: The model, with committed parameters.
        keeps: Whether this rank returns the tensors; other ranks return an empty dictionary.
    """
    state = model.state_dict()
    registered = dict(model.named_parameters(remove_duplicate=False))
    gathered: dict[Any, Tensor] = {}  # by parameter: tied ones have several names
    for name, value in state.items():
        if is_dtensor(value) and registered[name] not in gathered:
            whole = value.full_tensor()
            gathered[registered[name]] = whole.cpu() if keeps else whole.new_empty(0)
    if not keeps:
        return {}
    return {name: gathered[registered[name]] if is_dtensor(value) else value for name, value in state.items()}
