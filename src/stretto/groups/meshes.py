"""Meshes over a group that a process can leave, for models that FSDP2 shards.

Note [Equal meshes]
    Torch keeps one default group per process, and every mesh takes its groups from there. So a job that is built
    again on other ranks has the default group made again, and all groups that torch makes meanwhile end together with
    the given group.

    Torch also caches its results for a mesh, and treats equal meshes as one. So a new model's parameters may refer to
    a mesh of an ended job. Slices of a mesh of two dimensions are equal also where this process has moved from one
    node to another. So each dimension is a separate mesh here, over its ranks alone. It finds its group by name, and
    names follow from ranks: the mesh of before finds the group of now.
"""

import gc
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from stretto.errors import ConfigError
from stretto.groups.leavable import LeavableGroup
from stretto.groups.private import named_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_BACKEND = "leavable"
"""PyTorch's name of the backend of default groups that are made here."""


def meshes_over(group: LeavableGroup, shards: int, device_type: str) -> "dict[str, DeviceMesh]":
    """Return the mesh across nodes and the one inside this node, by name; see Note [Equal meshes].

    All ranks of `group` must call; they are numbered as it numbers them.

    It makes PyTorch's default group over the same ranks, which replaces an earlier one from this function.

    Args:
        group: A group that this process has not left.
        shards: Number of consecutive ranks that form a node.
        device_type: The device of the tensors of collectives.

    Raises:
        ConfigError: There is a default group from other code.
        CommunicationError: Not all ranks called it.
    """
    from torch.distributed.device_mesh import DeviceMesh  # half a second to import

    _make_default(group)
    node, shard = divmod(group.rank(), shards)
    members = {
        "node": list(range(shard, group.size(), shards)),
        "shard": list(range(node * shards, node * shards + shards)),
    }
    timeout = timedelta(seconds=group.timeout_seconds)

    def mesh(name: str) -> DeviceMesh:
        ranks = members[name]
        along = named_group(f"mesh-{name}-{ranks}", ranks, group.rank(), _BACKEND, timeout)
        return DeviceMesh.from_group(along, device_type, mesh_dim_names=(name,))

    return {name: mesh(name) for name in members}


def drop_default() -> None:
    """Remove PyTorch's default group and all groups made from it, if this module made it."""
    if dist.is_initialized() and dist.get_backend() == _BACKEND:
        dist.destroy_process_group()
        gc.collect()  # a sharded model is in cycles; the next one would lie in memory beside it


def _make_default(group: LeavableGroup) -> None:
    drop_default()
    if dist.is_initialized():
        raise ConfigError(
            "torch has a default group already, which would keep the lost ranks: expected no default group; "
            "remove init_process_group"
        )

    def create(store: Store, rank: int, world_size: int, timeout: timedelta) -> LeavableGroup:
        return group.of_torch(store, rank, world_size, timeout)

    dist.Backend.register_backend(_BACKEND, create, devices=["cpu", "cuda"])  # in the place of the one before
    # While a group waits for a rank that has died, it keeps the connection to the store, by which members agree.
    store: Store = group.get_group_store().clone()  # type: ignore[attr-defined]  # missing in torch's stub
    hook = sys.excepthook
    try:
        dist.init_process_group(
            _BACKEND,
            store=PrefixStore("default", store),
            rank=group.rank(),
            world_size=group.size(),
            timeout=timedelta(seconds=group.timeout_seconds),
        )
    finally:
        sys.excepthook = hook  # torch adds one more with every default group
