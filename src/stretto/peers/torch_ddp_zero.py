"""Stock DDP with ZeroRedundancyOptimizer: each rank steps a part and broadcasts it."""

from functools import partial
from typing import Any

import torch
from torch import nn

from stretto.owner.optimizer import read_hyperparameters, rebuild
from stretto.peers.torch_ddp import TorchDDP


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
