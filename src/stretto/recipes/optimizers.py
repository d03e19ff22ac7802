"""The stock optimizers, as options."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

Kernel = Literal["fused", "foreach", "loop"]
"""How PyTorch computes the step: one kernel per tensor, lists of tensors, or one tensor after another."""


def _flags(kernel: Kernel) -> dict[str, bool]:
    return {"fused": kernel == "fused", "foreach": kernel == "foreach"}


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW:
    """AdamW with weight decay on matrices alone."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the averages of gradient and square. 0.95 forgets early gradients sooner than the usual 0.999,
    as runs of a few thousand updates need."""

    eps: float = 1e-8
    """Added to the root of the averaged square."""

    weight_decay: float = 0.1
    """Decoupled decay per update, times the learning rate, of matrices and larger tensors. Vectors (biases,
    normalisation) do not decay."""

    kernel: Kernel = "fused"
    """`fused` is the fastest; `foreach` and `loop` equal each other to the bit however the
    parameters are cut."""

    def build(self, model: nn.Module, lr: float) -> torch.optim.AdamW:
        """The optimizer over `model`'s trainable parameters: two groups, matrices first."""
        matrices, vectors = _by_shape(model.parameters())
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=lr, betas=self.betas, eps=self.eps, **_flags(self.kernel))


@dataclass(frozen=True, kw_only=True, slots=True)
class SGD:
    """Stochastic gradient descent with momentum."""

    momentum: float = 0.9
    """Decay of the velocity; 0 for none."""

    nesterov: bool = False
    """Look ahead along the velocity."""

    weight_decay: float = 5e-4
    """Decay added to the gradient, of all parameters."""

    kernel: Kernel = "fused"
    """See `AdamW.kernel`."""

    def build(self, model: nn.Module, lr: float) -> torch.optim.SGD:
        """The optimizer over `model`'s trainable parameters, one group."""
        return torch.optim.SGD(
            [parameter for parameter in model.parameters() if parameter.requires_grad],
            lr=lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            **_flags(self.kernel),
        )


def _by_shape(parameters: Iterable[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    return (
        [parameter for parameter in trainable if parameter.ndim >= 2],
        [parameter for parameter in trainable if parameter.ndim < 2],
    )
