"""Stock FSDP2: parameters, gradients and optimizer state in shards, gathered by block when needed."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from stretto.peers.handle import Peer


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
