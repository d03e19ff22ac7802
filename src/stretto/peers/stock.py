"""Stock methods to compare with: no communication, DDP, DDP with ZeRO, FSDP2.

No communication at all: the limit of throughput.

Stock DistributedDataParallel: all-reduces beside the last backward pass, by bucket.

Stock DDP with ZeroRedundancyOptimizer: each rank steps a part and broadcasts it.

Stock FSDP2: parameters, gradients and optimizer state in shards, gathered by block when needed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from stretto.optimizer.probe import read_hyperparameters, rebuild
from stretto.peers.peer import Peer, Tally, Totals


class Compute(Peer):
    """Every rank trains a replica of its own: nothing is faster, and nothing is learned together.

    Replicas drift, so rank 0's is the one to evaluate, and its held-out loss is no limit of anything. The records
    suppose that all ranks do what this one does. A wish to stop is seen in the store, and each rank then ends
    after the update it is at.
    """

    name = "compute"
    needs_launcher = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._store = self._control.get_group_store()

    def agree(self, tally: Tally) -> Callable[[], Totals]:
        """Ask nobody but the store."""
        if tally.stop:
            self._store.set("stop", "")
        tally.stop = self._store.check(["stop"])
        everybody = tally.as_tensor().expand(self.world_size, -1)
        return lambda: Totals.of(everybody)


class TorchDDP(Peer):
    """DDP that exchanges with the last micro-batch of an update, as its `no_sync` is for."""

    name = "torch-ddp"

    def wrap(self, model: nn.Module) -> nn.Module:
        """See `Peer.wrap`."""
        self.ddp = DistributedDataParallel(model, process_group=self.group, gradient_as_bucket_view=True)
        return self.ddp

    def prepare(self, is_last: bool) -> None:
        """See `Peer.prepare`."""
        self.ddp.require_backward_grad_sync = is_last  # what `no_sync` sets, which wants a block


class TorchDDPbf16(TorchDDP):
    """DDP whose gradients travel in bfloat16."""

    name = "torch-ddp-bf16"

    def wrap(self, model: nn.Module) -> nn.Module:
        """See `Peer.wrap`."""
        wrapped = super().wrap(model)
        self.ddp.register_comm_hook(self.group, all_reduce_in_bf16)
        return wrapped


def all_reduce_in_bf16(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket's gradients over ranks, in bfloat16 on the wire; torch's own such hook refuses Gloo.

    Divided before the sum, which then stays in range and is rounded like torch's.
    """
    narrow = bucket.buffer().to(torch.bfloat16).div_(group.size())
    work = group.allreduce([narrow])

    def widen(_: Future[list[Tensor]]) -> Tensor:
        return bucket.buffer().copy_(narrow)

    averaged: Future[Tensor] = work.get_future().then(widen)
    return averaged


class TorchDDPZero(TorchDDP):
    """The given optimizer is the face that schedulers turn; ZeroRedundancyOptimizer owns the state."""

    name = "torch-ddp-zero"

    def wrap(self, model: nn.Module) -> nn.Module:
        """See `Peer.wrap`."""
        from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import

        self.zero = ZeroRedundancyOptimizer(
            [dict(group) for group in self.optimizer.param_groups],
            optimizer_class=partial(_part, self.optimizer),  # type: ignore[arg-type]  # only ever called
            process_group=self.group,
        )
        return super().wrap(model)

    def step(self) -> None:
        """See `Peer.step`."""
        for group, settings in zip(self.zero.param_groups, read_hyperparameters(self.optimizer), strict=True):
            group.update(settings)
        self.zero.step()


def _part(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Build the optimizer of this rank's part of the parameters."""
    return rebuild(optimizer, [group["params"] for group in groups])


class TorchFSDP2(Peer):
    """`fully_shard` with its defaults on every block and on the whole; gradients meet with the last micro-batch.

    The given model is sharded in place, and the given optimizer's parameters are replaced by their shards.
    """

    name = "torch-fsdp2"

    def wrap(self, model: nn.Module) -> nn.Module:
        """See `Peer.wrap`."""
        from torch.distributed.device_mesh import DeviceMesh  # slow to import, as fsdp is
        from torch.distributed.fsdp import fully_shard

        names = {id(parameter): name for name, parameter in model.named_parameters()}
        mesh = DeviceMesh.from_group(self.group, next(model.parameters()).device.type)
        self._blocks = [fully_shard(block, mesh=mesh) for block in blocks(model)]
        self._whole = fully_shard(model, mesh=mesh)
        sharded = dict(model.named_parameters())
        for group in self.optimizer.param_groups:
            group["params"] = [sharded[names[id(parameter)]] for parameter in group["params"]]
        return model

    def prepare(self, is_last: bool) -> None:
        """See `Peer.prepare`."""
        self._whole.set_requires_gradient_sync(is_last)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Gather everything once and keep it for the block, so that forward passes inside need no other rank."""
        modules = [*self._blocks, self._whole]
        for module in modules:
            module.unshard()
            module.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for module in modules:
                module.reshard()
                # The default, which keeps the root's parameters between its forward and backward pass.
                module.set_reshard_after_forward(module is not self._whole, recurse=False)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules to gather one by one: the longest list of layers, or else the direct children."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    candidates = max(lists, key=len) if lists else model.children()
    return [module for module in candidates if any(True for _ in module.parameters())]
