"""Private optimizers: optimizers of the user's class, with the user's settings, over other tensors."""

import copy
import inspect
import types
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from stretto.errors import UnsupportedOptimizer
from stretto.optimizer.over_shards import OverShards
from stretto.optimizer.settings import read_hyperparameters
from stretto.optimizer.several import Several

_OF_TORCH = {"state", "param_groups", "defaults", "step"}
_WRAPPED = ("optimizer", "_optimizer", "optim", "base_optimizer")
_PLAIN = (
    *(type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device),
    *(type, types.FunctionType, types.BuiltinFunctionType),
)


def rebuild(optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[Tensor]]) -> torch.optim.Optimizer:
    """Return a fresh optimizer of the same class, settings and plain attributes over other tensors.

    Args:
        optimizer: The user's optimizer.
        groups: Tensors for each of its groups, in order; a group may be empty.

    Raises:
        UnsupportedOptimizer: Its class cannot be built from its own defaults.
    """
    if isinstance(optimizer, Several):
        rest = iter(groups)
        return Several(
            [rebuild(member, list(islice(rest, len(member.param_groups)))) for member in optimizer.members]
        )
    if isinstance(optimizer, OverShards):
        return OverShards(rebuild(optimizer.inner, groups), optimizer.mesh)
    kind = type(optimizer)
    accepted = inspect.signature(kind).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    defaults = {key: value for key, value in optimizer.defaults.items() if open_ended or key in accepted}
    param_groups = [
        {**settings, "params": list(tensors)}
        for settings, tensors in zip(read_hyperparameters(optimizer), groups, strict=True)
    ]
    try:
        rebuilt = kind(param_groups, **defaults)
    except (TypeError, ValueError) as error:
        raise UnsupportedOptimizer(
            f"{kind.__name__} cannot be built over other tensors ({error}): expected an optimizer such as AdamW, whose "
            "constructor takes (params, **defaults)"
        ) from error
    missing = [name for name in list(accepted)[1:] if name not in defaults]
    for name, value in own_attributes(
        optimizer
    ).items():  # settings that it keeps on itself and not in its groups
        if _is_plain(value):
            setattr(rebuilt, name, copy.deepcopy(value))
        elif missing and not _is_same(value, vars(rebuilt).get(name)):
            raise UnsupportedOptimizer(
                f"{kind.__name__} cannot be built again: its attribute {name!r} (a {type(value).__name__}) "
                f"may depend on the constructor's arguments {missing}, which are not among its defaults; pass "
                "them to Optimizer.__init__ as defaults, or keep numbers and functions only"
            )
    return rebuilt


def is_elementwise(value: Any, parameter: Tensor) -> bool:
    """Return whether a state entry of a flat `parameter` has one value per element, like a moment."""
    return isinstance(value, Tensor) and value.dim() == 1 and value.numel() == parameter.numel()


def wrapped_optimizer(wrapper: object) -> str | None:
    """Return the name of the attribute in which `wrapper` holds an optimizer, as Accelerate's and Fabric's wrappers
    do; None if there is none.
    """
    for name in _WRAPPED:
        held = getattr(wrapper, name, None)
        if isinstance(held, torch.optim.Optimizer) and held is not wrapper:
            return name
    return None


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes that an optimizer's class adds to the base class."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _OF_TORCH and not name.startswith(("_optimizer_", "__"))
    }


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(one) for key, one in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor):
        return isinstance(other, Tensor) and value.shape == other.shape and bool((value == other).all())
    return value is other
