"""A task whose model is cut inside nodes: FSDP2 shards it, and the strategy trains across nodes (docs/sharded.md)."""

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
    """Bring the model of a task to its device, cut inside nodes if the job says so.

    Units that FSDP2 gathers are the members of the outermost `nn.ModuleList`s, which are the layers of a transformer,
    and the rest of the model. All ranks of the default group, or of the term, must call.

    Args:
        task: Not yet trained; its optimizer gets the shards instead of the parameters.
        job: Says how many ranks hold one model.
        device: Of this rank.
        term: Of a job that survives the loss of ranks.

    Returns:
        A mesh with the dimensions `node` and `shard`, or None where every rank holds a whole model.

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
    """Let FSDP2 cut the model of a task over `mesh`, on `device`, and give its optimizer the shards; see `placed`."""
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
    """Return `model.state_dict()` with whole tensors, which for a sharded model are gathered one after the other.

    All ranks of a node must call where the model is sharded. One that keeps them has them in the processor's memory.

    Args:
        model: With committed parameters.
        keeps: Whether this rank returns them; others return nothing.
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
