"""Stock DistributedDataParallel: all-reduces beside the last backward pass, by bucket."""

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from stretto.peers.handle import Peer


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
