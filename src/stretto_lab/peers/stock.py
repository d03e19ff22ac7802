"""PyTorch's own methods to compare with: DDP, its hooks, ZeRO, local SGD, FSDP2, and training without communication."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from stretto.fields import check_at_least, check_fields
from stretto.optimizer.private import rebuild
from stretto.optimizer.settings import read_hyperparameters
from stretto_lab.peers.peer import Peer, Tally, Totals


class Compute(Peer):
    """Every rank trains alone: no method can be faster, and the ranks learn nothing from each other.

    So its rate is the limit for all methods; its held-out loss, of rank 0's replica, is no limit. The records assume
    that all ranks make the same progress. A rank that wants to stop writes so into the store; every rank ends after the
    update at which it reads that.
    """

    name = "compute"
    needs_launcher = False

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._store = self._control.get_group_store()

    def agree(self, tally: Tally) -> Callable[[], Totals]:
        """Read the store; ranks exchange nothing else."""
        if tally.stop:
            self._store.set("stop", "")
        tally.stop = self._store.check(["stop"])
        everybody = tally.as_tensor().expand(self.world_size, -1)
        return lambda: Totals.of(everybody)


class TorchDDP(Peer):
    """DistributedDataParallel: all-reduces by bucket, during the backward pass of an update's last micro-batch."""

    name = "torch-ddp"

    def wrap(self, model: nn.Module) -> nn.Module:
        self.ddp = DistributedDataParallel(model, process_group=self.group, gradient_as_bucket_view=True)
        return self.ddp

    def prepare(self, is_last: bool) -> None:
        self.ddp.require_backward_grad_sync = is_last  # as `no_sync` does, which needs a `with` block


class TorchDDPbf16(TorchDDP):
    """DDP whose gradients are sent in bfloat16."""

    name = "torch-ddp-bf16"

    def wrap(self, model: nn.Module) -> nn.Module:
        wrapped = super().wrap(model)
        self.ddp.register_comm_hook(self.group, all_reduce_in_bf16)
        return wrapped


def all_reduce_in_bf16(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Run PyTorch's own hook; DDP accepts it under its own name only on accelerators."""
    averaged: Future[Tensor] = bf16_compress_hook(group, bucket)
    return averaged


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PowerSGDOptions:
    """Options of PowerSGD."""

    whole_updates: int = 2
    """Number of first updates that send whole gradients: PyTorch's minimum, because on slow links they take most of the
    time. PyTorch advises as many as the learning rate's warm-up has."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, whole_updates=2)


class TorchDDPPowerSGD(TorchDDP):
    """DDP with torch's PowerSGD hook: a gradient is sent as two thin matrices of rank 1, with error feedback."""

    name = "torch-ddp-powersgd"
    options_type = PowerSGDOptions

    def wrap(self, model: nn.Module) -> nn.Module:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        wrapped = super().wrap(model)
        state = powerSGD_hook.PowerSGDState(
            self.group, matrix_approximation_rank=1, start_powerSGD_iter=self.options.whole_updates
        )

        def one_bucket_at_a_time(state: Any, bucket: GradBucket) -> Future[Tensor]:
            # Its later all-reduces are issued when the first is over: those of two buckets cross, on some ranks only.
            averaged: Future[Tensor] = powerSGD_hook.powerSGD_hook(state, bucket)
            averaged.wait()
            return averaged

        self.ddp.register_comm_hook(state, one_bucket_at_a_time)
        return wrapped


class Replicas(Peer):
    """A method whose ranks step alone, so that replicas differ until they are averaged.

    A rank's gradient is the plain mean of its micro-batches, so their weights must be equal.
    """

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Show the mean of all replicas during the block, then restore each rank's values."""
        from torch.distributed.algorithms.model_averaging.utils import average_parameters

        own = [parameter.detach().clone() for parameter in self.model.parameters()]
        average_parameters(self.model.parameters(), self.group)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(self.model.parameters(), own, strict=True):
                    parameter.copy_(value)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LocalSGDOptions:
    """Options of torch's local SGD."""

    interval: int = 10
    """Updates between two averages of the replicas."""
    whole_updates: int = 2
    """Number of first updates, which average gradients. PyTorch advises more, but they decide on slow links."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, interval=1, whole_updates=0)


class TorchLocalSGD(Replicas, TorchDDP):
    """DDP for the first updates, then PostLocalSGDOptimizer: ranks step alone and average replicas at intervals."""

    name = "torch-local-sgd"
    options_type = LocalSGDOptions

    def wrap(self, model: nn.Module) -> nn.Module:
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hooks
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        wrapped = super().wrap(model)
        whole = self.options.whole_updates
        state = hooks.PostLocalSGDState(self.group, self.group, whole, post_local_gradient_allreduce=False)
        self.ddp.register_comm_hook(state, hooks.post_localSGD_hook)
        averager = PeriodicModelAverager(self.options.interval, whole, process_group=self.group)
        self.local = PostLocalSGDOptimizer(self.optimizer, averager)
        return wrapped

    def step(self) -> None:
        self.local.step()


class TorchDDPZero(TorchDDP):
    """DDP with ZeroRedundancyOptimizer: each rank steps a part of the parameters and broadcasts it.

    Schedulers set the rates of the given optimizer. Its settings are copied before every step to the sharded optimizer,
    which has the state.
    """

    name = "torch-ddp-zero"

    def wrap(self, model: nn.Module) -> nn.Module:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import

        self.zero = ZeroRedundancyOptimizer(
            [dict(group) for group in self.optimizer.param_groups],
            optimizer_class=partial(_part, self.optimizer),  # type: ignore[arg-type]  # only ever called
            process_group=self.group,
        )
        return super().wrap(model)

    def step(self) -> None:
        for group, settings in zip(self.zero.param_groups, read_hyperparameters(self.optimizer), strict=True):
            group.update(settings)
        self.zero.step()


def _part(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Build the optimizer of this rank's part of the parameters."""
    return rebuild(optimizer, [group["params"] for group in groups])


class TorchFSDP2(Peer):
    """`fully_shard` with its defaults on every block and on the whole model.

    The given model is sharded in place, and the given optimizer's parameters are replaced by their shards. Gradients
    are reduced with the last micro-batch of an update.
    """

    name = "torch-fsdp2"

    def wrap(self, model: nn.Module) -> nn.Module:
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
        self._whole.set_requires_gradient_sync(is_last)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Gather all parameters once and keep them during the block, so that forward passes need no other rank."""
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
