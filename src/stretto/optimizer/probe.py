"""Optimizers of the user's class over other tensors, and a trial that shows whether an optimizer may be sharded."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stretto.errors import UnsupportedOptimizer
from stretto.flat import ALIGNMENT

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


_ROWS, _COLUMNS = 4, ALIGNMENT
_STEPS = 3
_LEARNING_RATE = 0.01


def check_shardable(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless stepping a matrix whole equals stepping it cut into flat pieces, to the bit.

    Names prove nothing: what an optimizer does with the shape of a tensor, or across its elements, shows when
    the same gradients go through it whole and cut.

    Args:
        optimizer: The user's; it is rebuilt over probe tensors, never stepped.

    Raises:
        UnsupportedOptimizer: The results differ, or the optimizer cannot step flat tensors by itself.
    """
    name = type(optimizer).__name__
    try:
        whole = _run(optimizer, [(0, _ROWS * _COLUMNS)], (_ROWS, _COLUMNS))
        cut = _run(optimizer, [(0, ALIGNMENT), (ALIGNMENT, _ROWS * _COLUMNS)], (-1,))
    except UnsupportedOptimizer:
        raise
    except Exception as error:
        raise UnsupportedOptimizer(
            f"{name} cannot step a flat tensor by itself ({type(error).__name__}: {error}): expected an "
            "element-wise optimizer such as AdamW or SGD"
        ) from error
    if not torch.equal(whole, cut):
        raise UnsupportedOptimizer(
            f"{name} cannot be cut into shards: stepping a {_ROWS}x{_COLUMNS} tensor whole and in two flat "
            f"pieces differs by up to {float((whole - cut).abs().max()):.3g}; expected an element-wise optimizer "
            "such as AdamW or SGD"
        )


def _run(
    optimizer: torch.optim.Optimizer, ranges: Sequence[tuple[int, int]], shape: tuple[int, ...]
) -> Tensor:
    """Step the probe in the given pieces and return it flat."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_ROWS * _COLUMNS, generator=generator)
    pieces = [start[a:b].clone().view(shape).requires_grad_() for a, b in ranges]
    probe = rebuild(optimizer, [pieces, *([] for _ in optimizer.param_groups[1:])])
    # A warm-up may start at zero, where every optimizer looks harmless.
    for group in probe.param_groups:
        group["lr"] = _LEARNING_RATE
    for _ in range(_STEPS):
        gradient = torch.randn(_ROWS * _COLUMNS, generator=generator)
        for (a, b), piece in zip(ranges, pieces, strict=True):
            piece.grad = gradient[a:b].clone().view(shape)
        probe.step()
    return torch.cat([piece.detach().flatten() for piece in pieces])
