"""Steps of whole tensors whose rows the ranks of a node share.

Note [Over shards]
    The optimizer's own code steps `DTensor`s over the node's ranks: PyTorch gathers the operands of that code, as for
    an optimizer over FSDP2's parameters. Masters and state are not moved; gathered values exist only during a step.
    All ranks of a node step the same tensors in the same order: shards go to owners alike
    (`stretto.flat.shards.dealt_numel`), and all ranks know which parameters were used.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.flat import is_dtensor
from stretto.optimizer.several import as_one, members_of


class OverShards(torch.optim.Optimizer):
    """Steps the whole tensors whose rows are an optimizer's members.

    Groups and state are held here, of this rank's tensors alone, and lent to the optimizer for a step.

    Args:
        inner: The optimizer.
        mesh: Returns a `DeviceMesh` of the node's ranks, of one dimension, whose group no other code uses during a
            step. It is a function, because copies of an optimizer share it.
    """

    def __init__(self, inner: torch.optim.Optimizer, mesh: Callable[[], Any]) -> None:
        super().__init__([{"params": []}], {})
        self.inner, self.mesh = inner, mesh
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure, so no loss
        """Step every tensor with a gradient; all ranks of the node must call it, with the same tensors."""
        rows = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        united = dict(zip(rows, self._united(rows), strict=True)) if rows else {}
        self.inner.param_groups = [
            {**group, "params": [united[one] for one in group["params"] if one in united]}
            for group in self.param_groups
        ]
        self.inner.state = defaultdict(dict)
        for one, whole in united.items():
            if state := self.state.get(one):
                self.inner.state[whole] = {key: _united_entry(value, whole) for key, value in state.items()}
        self.inner.step()
        for one, whole in united.items():
            state = self.inner.state.get(whole, {})
            self.state[one] = {key: _own_entry(value, whole) for key, value in state.items()}
        for group, stepped in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update({**stepped, "params": group["params"]})
        self._lend()  # and nothing of what was brought together

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from this rank's `state_dict`."""
        self._lend()
        self.inner.load_state_dict(state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "inner": self.inner, "mesh": self.mesh}

    def _lend(self) -> None:
        self.inner.param_groups, self.inner.state = self.param_groups, self.state

    def _united(self, rows: Sequence[Tensor]) -> list[Any]:
        """Return the whole tensors, with their gradients, over the memory of these rows."""
        counts = torch.tensor([one.shape[0] for one in rows], device=rows[0].device)
        mesh = self.mesh()
        dist.all_reduce(counts, group=mesh.get_group())
        found = []
        for one, count in zip(rows, counts.tolist(), strict=True):
            shape = torch.Size((count, *one.shape[1:]))
            united = _over(one, mesh, shape)
            united.grad = None if one.grad is None else _over(one.grad, mesh, shape)
            found.append(united)
        return found


def over_shards(
    optimizer: torch.optim.Optimizer, whole: Collection[int], group: dist.ProcessGroup, device: torch.device
) -> torch.optim.Optimizer:
    """Return an optimizer of the same settings that steps the tensors of some groups over the shards of a node.

    Args:
        optimizer: The user's optimizer, or several joined to one.
        whole: Indices of the groups whose tensors stay whole: all of a member's groups, or none.
        group: The group of the node's ranks, in the order of their rows.
        device: The device of the tensors.
    """
    from torch.distributed.device_mesh import DeviceMesh  # with `DTensor` half a second to import

    # PyTorch keeps what it has worked out for a mesh, and takes meshes of the same ranks and names for the same one:
    # also FSDP2's, whose group is the compute lane's, and one of a job that has ended.
    mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=(group.group_name,))
    members, first = [], 0
    for member in members_of(optimizer):
        last = first + len(member.param_groups)
        members.append(
            OverShards(member, lambda: mesh) if any(first <= one < last for one in whole) else member
        )
        first = last
    one: torch.optim.Optimizer = as_one(members)
    return one


def alone(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer before `over_shards`, which steps tensors of this rank alone."""
    members = [member.inner if isinstance(member, OverShards) else member for member in members_of(optimizer)]
    one: torch.optim.Optimizer = as_one(members)
    return one


def _over(rows: Tensor, mesh: Any, shape: torch.Size) -> Any:
    """Return a tensor whose rows are distributed over `mesh`, over the memory of this rank's rows."""
    from torch.distributed.tensor import DTensor, Shard

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(rows.detach(), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)


def _united_entry(value: Any, united: Any) -> Any:
    """Convert a state entry of rows to an entry of the whole tensor."""
    is_moment = isinstance(value, Tensor) and value.dim() and is_dtensor(united)
    return _over(value, united.device_mesh, united.shape) if is_moment else value


def _own_entry(value: Any, united: Any) -> Any:
    """Convert a state entry of a whole tensor to an entry of this rank's rows."""
    if not is_dtensor(value):
        return value
    return (value.redistribute(placements=united.placements) if value.dim() else value).to_local()
