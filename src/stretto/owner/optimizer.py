"""Builds optimizers of the user's class over other tensors, and reads the user's hyperparameters."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.errors import UnsupportedOptimizer

Hyperparameters = list[dict[str, Any]]
"""Per parameter group, every entry but the parameters."""


def read_hyperparameters(optimizer: torch.optim.Optimizer) -> Hyperparameters:
    """Return what schedulers and users may turn, by value, at this moment."""
    return [
        {key: _by_value(value) for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def rebuild(optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[Tensor]]) -> torch.optim.Optimizer:
    """Return a fresh optimizer of the same class, defaults and group settings over other tensors.

    Args:
        optimizer: The user's.
        groups: Tensors for each of its groups, in order; a group may be empty.

    Raises:
        UnsupportedOptimizer: Its class cannot be built from its own defaults.
    """
    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    defaults = {key: value for key, value in optimizer.defaults.items() if open_ended or key in accepted}
    param_groups = [
        {**settings, "params": list(tensors)}
        for settings, tensors in zip(read_hyperparameters(optimizer), groups, strict=True)
    ]
    try:
        return kind(param_groups, **defaults)
    except (TypeError, ValueError) as error:
        raise UnsupportedOptimizer(
            f"{kind.__name__} cannot be built over flat slices of parameters ({error}): expected an element-wise "
            "optimizer such as AdamW or SGD, whose constructor takes (params, **defaults)"
        ) from error


def is_elementwise(value: Any, parameter: Tensor) -> bool:
    """Return whether an entry of the state of a flat `parameter` has one value per element, as a moment has."""
    return isinstance(value, Tensor) and value.dim() == 1 and value.numel() == parameter.numel()


def _by_value(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
