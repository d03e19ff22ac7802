"""Sharding inside nodes: the meshes determine which ranks hold shards together and across which ranks the job trains.

Note [Two meshes]
    `fully_shard(module, mesh=mesh["shard"])` cuts parameters among the ranks of a node. `DataParallel(...,
    mesh=mesh["node"])` trains across the ranks that hold the same shard of different nodes. Both are dimensions of one
    mesh, whose ranks rise along both: so the n-th of every `mesh["node"]` are on one node.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from stretto.engine.failures import FailureDetector
from stretto.errors import ConfigError, UnsupportedModel
from stretto.flat import original_name, shard_of


@dataclasses.dataclass(frozen=True, slots=True)
class Sharding:
    """The ranks of a job whose model is sharded inside nodes; see Note [Two meshes]."""

    ranks: tuple[tuple[int, ...], ...]
    """Ranks of the default group, node by node, in the order of their shards."""
    node: int
    """Index of this process's node."""
    shard: int
    """Index of this process's shard on its node."""
    group: dist.ProcessGroup
    """Group of this node's ranks, which FSDP2 uses."""

    @property
    def everyone(self) -> list[int]:
        """Return all ranks of the default group that train, in rising order."""
        return sorted(itertools.chain(*self.ranks))

    @property
    def inside(self) -> tuple[int, ...]:
        """The ranks of this node, as the job numbers them."""
        return self._numbered(self.ranks[self.node])

    @property
    def across(self) -> tuple[int, ...]:
        """The ranks that hold this shard, as the job numbers them."""
        return self._numbered([node[self.shard] for node in self.ranks])

    def _numbered(self, ranks: Any) -> tuple[int, ...]:
        everyone = self.everyone
        return tuple(everyone.index(rank) for rank in ranks)


class NodeFailures(FailureDetector):
    """A failure detector that also explains failures of FSDP2's collectives in passes through the model.

    Args:
        sharding: The ranks that pass through the model together; see `FailureDetector` for the other arguments.
    """

    def __init__(self, *args: Any, sharding: Sharding, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.waited_in.append(sharding.group)
        self._inside = sharding.inside

    @property
    def is_over(self) -> bool:
        """Whether the job has ended on this rank."""
        return self._watcher.is_over

    def cause_of(self, error: BaseException) -> BaseException:
        """Return the error to raise for an error of a job: for a backend's error, the diagnosis of the node's other
        ranks.
        """
        cause = super().cause_of(error)
        # Gloo's errors have no class of their own.
        is_backends = isinstance(cause, dist.DistError) or (
            type(cause) is RuntimeError and "gloo" in str(cause)
        )
        if cause is not error or not is_backends:
            return cause
        return self._stall_diagnosis("other ranks in a pass through the model", self._inside).into(error)


def sharding_of(model: object, mesh: object) -> Sharding:
    """Return how `model` is sharded; all ranks of the node must call it.

    Args:
        model: A model sharded by `fully_shard`.
        mesh: The dimension of the mesh across which the job trains.

    Raises:
        UnsupportedModel: It is not sharded, or not by `fully_shard` over a mesh of one dimension.
        ConfigError: The meshes of model and job do not fit.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        found = f"{mesh.ndim} dimensions" if isinstance(mesh, DeviceMesh) else f"a {type(mesh).__name__}"
        raise ConfigError(
            f"mesh: expected the dimension of a DeviceMesh across which the job trains, as mesh['node'], found {found}"
        )
    inside = _mesh_of(model)
    across = mesh.mesh.tolist()
    own = torch.full((dist.get_world_size(),), -1, device=inside.device_type)
    own[: len(across)] = torch.tensor(across)
    gathered = [torch.empty_like(own) for _ in range(inside.size())]
    dist.all_gather(gathered, own, group=inside.get_group())
    columns = [[rank for rank in column.tolist() if rank >= 0] for column in gathered]
    node = across.index(dist.get_rank())
    ranks = tuple(zip(*columns, strict=False))
    fits = (
        len({len(column) for column in columns}) == 1
        and ranks[node] == tuple(inside.mesh.tolist())
        and all(_rises(line) for line in (*columns, *ranks))
        and len(set(itertools.chain(*ranks))) == len(across) * inside.size()
    )
    if not fits:
        raise ConfigError(
            f"mesh: expected another dimension of the mesh that the model is sharded over, with rising ranks, as "
            f"init_device_mesh('cuda', (nodes, shards), mesh_dim_names=('node', 'shard')) makes them; found ranks "
            f"{inside.mesh.tolist()} inside and {across} across"
        )
    return Sharding(ranks, node, inside.get_local_rank(), inside.get_group())


def arrivals(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[int]:
    """Return a number for each parameter that grows with the expected arrival of its gradient; equal within a unit
    of FSDP2.

    Units come in the reverse order of registration, and one that holds others after these: the root last.
    """
    order: list[nn.Parameter] = []

    def visit(module: nn.Module) -> list[nn.Parameter]:
        """Append the units inside a module to the order; return the parameters that are in no unit."""
        own: list[nn.Parameter] = []
        for child in reversed(list(module.children())):
            left = visit(child)
            (order if isinstance(child, FSDPModule) else own).extend(left)
        return [*own, *reversed(list(module.parameters(recurse=False)))]

    order += visit(model)
    found: dict[int, int] = {}
    for index, parameter in enumerate(order):
        found.setdefault(id(parameter), index)
    return [found[id(parameter)] for parameter in parameters]


def _rises(line: Any) -> bool:
    return all(a < b for a, b in itertools.pairwise(line))


def _mesh_of(model: object) -> DeviceMesh:
    """Return the mesh over which `fully_shard` has sharded a model, after checking every parameter."""
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(f"model: expected an nn.Module, found a {type(model).__name__}")
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        found = (
            "a DTensor of another origin (tensor parallelism)"
            if _has_dtensor(model)
            else "ordinary parameters"
        )
        raise UnsupportedModel(
            f"model: with mesh=..., expected one that fully_shard has sharded inside the node, found {found}: "
            "call fully_shard(model, mesh=mesh['shard']) before the optimizer and DataParallel, or omit mesh"
        )
    # FSDP2 leaves the root gathered after a forward pass without a backward one.
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    meshes: list[DeviceMesh] = []
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            _check_shard(original_name(name), parameter)
            meshes.append(parameter.device_mesh)
        elif parameter.requires_grad:
            raise UnsupportedModel(
                f"parameter {original_name(name)!r} is not sharded, so its gradients would not be summed inside the "
                "node: expected fully_shard(model, mesh=mesh['shard']) on the whole model, after its parts"
            )
    if any(mesh != meshes[0] for mesh in meshes):
        raise UnsupportedModel(
            "model: expected all parameters sharded over one mesh, found several: give every fully_shard the same "
            "mesh['shard']"
        )
    return meshes[0]


def _has_dtensor(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _check_shard(name: str, parameter: DTensor) -> None:
    mesh, placements = parameter.device_mesh, parameter.placements
    if any(placement.is_replicate() for placement in placements):
        raise UnsupportedModel(
            f"parameter {name!r} is replicated over a dimension of its mesh (HSDP), and fully_shard would sum "
            "its gradients between nodes at every backward pass: expected fully_shard(module, "
            "mesh=mesh['shard']); the strategy exchanges across nodes"
        )
    if len(placements) != 1 or not isinstance(placements[0], Shard):
        raise UnsupportedModel(
            f"parameter {name!r} has placements {placements}: expected shards by fully_shard alone; tensor parallelism "
            "and other placements are not supported"
        )
    local, shard = shard_of(parameter)
    if placements[0].dim != 0 or shard is None:
        raise UnsupportedModel(
            f"parameter {name!r} is sharded along dimension {placements[0].dim}: expected rows, dimension 0; "
            "remove shard_placement_fn"
        )
    if local.device.type != mesh.device_type:
        raise UnsupportedModel(
            f"parameter {name!r} is on {local.device} and its mesh on {mesh.device_type}: CPU offload is not "
            "supported; remove offload_policy"
        )
