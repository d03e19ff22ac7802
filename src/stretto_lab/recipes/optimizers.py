"""PyTorch's optimizers as options, and the learning rate over the updates: warm-up, then a half cosine."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from stretto import errors
from stretto.fields import check_at_least, check_fields
from stretto.optimizer import as_one


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW:
    """AdamW, with weight decay on matrices or on all parameters."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the averages of the gradient and of its square. 0.95 forgets early gradients sooner than the usual
    0.999, which suits runs of a few thousand updates."""

    weight_decay: float = 0.1
    """Decoupled decay per update, times the learning rate."""

    decays: Literal["matrices", "all"] = "matrices"
    """The parameters that decay: matrices and larger tensors, as is usual, or vectors (biases, normalisation) too."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise errors.ConfigError(f"betas must be at least 0 and below 1, found {self.betas}")
        check_at_least(self, weight_decay=0)

    def build(self, model: nn.Module, lr: float) -> torch.optim.AdamW:
        """Return the optimizer over `model`'s trainable parameters, with one group of matrices and one of vectors."""
        return self.over(_trainable(model), lr)

    def over(self, trainable: Sequence[nn.Parameter], lr: float) -> torch.optim.AdamW:
        """Return the optimizer over these parameters."""
        groups = [
            {"params": [one for one in trainable if one.ndim >= 2], "weight_decay": self.weight_decay},
            {
                "params": [one for one in trainable if one.ndim < 2],
                "weight_decay": self.weight_decay if self.decays == "all" else 0.0,
            },
        ]
        # A checkpoint has a group's settings under its parameters' names: one without any would come back with others.
        groups = [group for group in groups if group["params"]]
        return torch.optim.AdamW(groups, lr=lr, betas=self.betas, fused=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class SGD:
    """Stochastic gradient descent with momentum."""

    momentum: float = 0.9
    """Decay of the velocity; 0 for none."""

    weight_decay: float = 5e-4
    """Decay added to the gradient of all parameters."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_at_least(self, momentum=0, weight_decay=0)

    def build(self, model: nn.Module, lr: float) -> torch.optim.SGD:
        """Return the optimizer over `model`'s trainable parameters, in one group."""
        return torch.optim.SGD(
            _trainable(model),
            lr=lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            fused=True,
        )


def muon(model: nn.Module, lr: float, others: AdamW) -> Optimizer:
    """Return Muon for hidden matrices and AdamW for embeddings, output layer and vectors, as one optimizer.

    Steps of Muon are scaled to the size of AdamW's steps, so that one learning rate and AdamW's usual decay suit both
    (Liu et al., Muon is Scalable for LLM Training, arXiv 2502.16982).

    Args:
        model: Its method `get_output_embeddings`, if any, returns its output layer.
        lr: Learning rate of both.
        others: Settings of AdamW.

    Raises:
        ConfigError: There is no hidden matrix.
    """
    output = getattr(model, "get_output_embeddings", lambda: None)()
    outer = [module for module in model.modules() if isinstance(module, nn.Embedding) or module is output]
    apart = {id(parameter) for module in outer for parameter in module.parameters()}
    hidden: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for parameter in _trainable(model):
        is_hidden = parameter.ndim == 2 and id(parameter) not in apart
        (hidden if is_hidden else rest).append(parameter)
    if not hidden:
        raise errors.ConfigError("muon steps hidden matrices, and the model has none: expected adamw")
    of_matrices = torch.optim.Muon(hidden, lr=lr, adjust_lr_fn="match_rms_adamw")
    return as_one([of_matrices, others.over(rest, lr)])  # type: ignore[no-any-return]  # of two it makes one


LanguageOptimizer = Literal["adamw", "muon", "adafactor"]
"""Names of the optimizers for a language model."""


def language_optimizer(
    name: LanguageOptimizer, model: nn.Module, lr: float | None, adamw: AdamW, *, usual_lr: float
) -> Optimizer:
    """Return the optimizer that a recipe names.

    Args:
        name: The optimizer.
        model: The model with the trainable parameters.
        lr: Learning rate; None uses the usual one.
        adamw: Settings of AdamW, also together with Muon.
        usual_lr: Usual rate of AdamW and Muon; Adafactor's is 0.01 (Shazeer & Stern, arXiv 1804.04235).
    """
    if name == "adafactor":
        return torch.optim.Adafactor(_trainable(model), lr=0.01 if lr is None else lr)
    rate = usual_lr if lr is None else lr
    return muon(model, rate, adamw) if name == "muon" else adamw.build(model, rate)


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Factor on the learning rate: a linear warm-up over the committed updates, then a half cosine to a floor.

    It is a function of the number of updates instead of a chain of PyTorch's `LinearLR` and `CosineAnnealingLR`,
    because these save the length of the run in their state, so that a resumed run could not become longer.
    """

    warmup: int = 20
    """Updates until the full rate is reached; at most a tenth of the run if its length is known."""

    floor: float = 0.1
    """Factor at the end of the cosine, between 0 and 1; 1 keeps the full rate. A run that only time ends keeps it too.
    """

    def __post_init__(self) -> None:
        check_fields(self)
        if self.warmup < 0:
            raise errors.ConfigError(f"warmup must not be negative, found {self.warmup} updates")
        if not 0 <= self.floor <= 1:
            raise errors.ConfigError(
                f"the floor of the learning rate is a factor in [0, 1], found {self.floor}"
            )

    def factor(self, updates: int | None) -> Callable[[int], float]:
        """Return the factor for the update after `done` committed ones, as a function of `done`.

            warm-up   (done + 1) / warmup
            cosine    floor + (1 - floor) * (1 + cos(pi * progress)) / 2

        Args:
            updates: Length of the run; None if it is not known.
        """
        warmup = self.warmup if updates is None else min(self.warmup, updates // 10)

        def at(done: int) -> float:
            if done < warmup:
                return (done + 1) / warmup
            if updates is None:
                return 1.0
            progress = min(1.0, (done - warmup) / max(1, updates - warmup))
            return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * progress)) / 2

        return at

    def build(self, optimizer: Optimizer, updates: int | None) -> LambdaLR:
        """Return a scheduler of `optimizer` to step once per committed update."""
        # A closure, because LambdaLR saves the state of an object: a longer run would get back the old length.
        return LambdaLR(optimizer, self.factor(updates))
