"""Decides the layout of a model's trainable parameters."""

import math
import sys
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from stretto.errors import UnsupportedModel, UnsupportedOptimizer
from stretto.flat.layout import ALIGNMENT, Bucket, FlatSet, Layout, Slot

_TRAINABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def plan_layout(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    world_size: int,
    bucket_bytes: int,
    widen: bool,
) -> tuple[Layout, list[nn.Parameter]]:
    """Plan the flat layout of the parameters that `optimizer` trains.

    Parameters are ordered as their gradients become ready, which reverse registration approximates. Groups
    of the optimizer stay together, so that an owner cuts few segments.

    Args:
        model: Whose trainable parameters; tied ones count once, frozen ones not at all.
        optimizer: Whose groups.
        world_size: Number of ranks.
        bucket_bytes: Upper bound of a bucket in the gradient buffer, in bytes.
        widen: Accumulate 16-bit parameters' gradients in float32.

    Returns:
        The layout, and the parameters in the order of its slots.

    Raises:
        UnsupportedModel: Nothing trains, or a parameter cannot be averaged or has no values.
        UnsupportedOptimizer: Model and optimizer disagree on what trains.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise UnsupportedModel(
            "the model has no trainable parameter: expected at least one requires_grad=True"
        )
    for name, parameter in model.named_parameters():
        _check_parameter(name, parameter)
    groups = _group_of_parameter(named, optimizer)
    keys = sorted({_set_key(parameter) for _, parameter in named})
    ordered = sorted(reversed(named), key=lambda item: (keys.index(_set_key(item[1])), groups[id(item[1])]))
    sets: list[FlatSet] = []
    slots: list[Slot] = []
    buckets: list[Bucket] = []
    for set_index, key in enumerate(keys):
        members = [(name, parameter) for name, parameter in ordered if _set_key(parameter) == key]
        first = members[0][1]
        accumulation_dtype = torch.float32 if widen and first.dtype.itemsize < 4 else first.dtype
        stop = 0
        for name, parameter in members:
            slots.append(
                Slot(
                    name=name,
                    index=len(slots),
                    set_index=set_index,
                    start=stop,
                    numel=parameter.numel(),
                    shape=tuple(parameter.shape),
                    group=groups[id(parameter)],
                )
            )
            stop = _round_up(stop + parameter.numel(), ALIGNMENT)
        # At least one element: where all parameters are empty there is still something to send.
        cuts = _cut(max(stop, 1), bucket_bytes // accumulation_dtype.itemsize, world_size * ALIGNMENT)
        buckets.extend(Bucket(set_index, start, numel) for start, numel in cuts)
        sets.append(FlatSet(first.dtype, accumulation_dtype, first.device, buckets[-1].stop))
    layout = Layout(world_size, tuple(sets), tuple(slots), tuple(buckets))
    return layout, [parameter for _, parameter in ordered]


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if _is_dtensor(parameter):
        raise UnsupportedModel(
            f"parameter {name!r} is a DTensor: expected ordinary parameters; do not shard the model before wrapping it"
        )
    if is_lazy(parameter) or parameter.is_meta:
        raise UnsupportedModel(
            f"parameter {name!r} has no values yet: expected a complete model; run a forward pass (lazy modules) or "
            "materialise it (meta device) before making the optimizer and wrapping"
        )
    if parameter.requires_grad and parameter.dtype not in _TRAINABLE_DTYPES:
        advice = {
            torch.float16: "float16 needs loss scaling (GradScaler), which is not supported; use bfloat16",
            torch.complex64: "store complex values as pairs of real ones",
            torch.complex128: "store complex values as pairs of real ones",
        }.get(parameter.dtype, "freeze it with requires_grad_(False), or convert it")
        raise UnsupportedModel(
            f"parameter {name!r} has dtype {parameter.dtype}: expected one of {_TRAINABLE_DTYPES}; {advice}"
        )


def _is_dtensor(parameter: nn.Parameter) -> bool:
    # Importing the module costs half a second, and nobody has a DTensor who has not imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(parameter, module.DTensor)


def _group_of_parameter(
    named: Sequence[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer
) -> dict[int, int]:
    """Map the id of every trainable parameter to its group's index."""
    groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    missing = [name for name, parameter in named if id(parameter) not in groups]
    if missing:
        raise UnsupportedOptimizer(
            f"{len(missing)} trainable parameters are in no group of the optimizer, among them {missing[:3]}: "
            "add them or freeze them with requires_grad_(False)"
        )
    known = {id(parameter) for _, parameter in named}
    foreign = sum(
        1
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad and id(p) not in known
    )
    if foreign:
        raise UnsupportedOptimizer(
            f"the optimizer trains {foreign} parameters that the model does not have: build it from "
            "model.parameters() after the model is complete"
        )
    return groups


def _set_key(parameter: nn.Parameter) -> tuple[str, str]:
    return str(parameter.device), str(parameter.dtype)


def _cut(numel: int, numel_max: int, multiple: int) -> list[tuple[int, int]]:
    """Cut `numel` elements into equal ranges of at most about `numel_max`, each a multiple of `multiple`."""
    count = max(1, math.ceil(numel / max(numel_max, multiple)))
    each = _round_up(math.ceil(numel / count), multiple)
    starts = range(0, numel, each)
    return [(start, min(each, _round_up(numel - start, multiple))) for start in starts]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
