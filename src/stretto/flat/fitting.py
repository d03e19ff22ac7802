"""Conditions that a model must meet to be trained by a job."""

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from stretto.errors import UnsupportedModel
from stretto.flat.memory import check_memory
from stretto.flat.shards import is_dtensor

_TRAINABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def original_name(name: str) -> str:
    """Return the name of a parameter or buffer before `torch.compile` wrapped any part of the model."""
    return name.replace("_orig_mod.", "")


def check_parameters(model: nn.Module, *, sharded: bool = False) -> None:
    """Raise unless a job can train the model's parameters.

    Args:
        model: The model.
        sharded: Whether they may be sharded inside a node.

    Raises:
        UnsupportedModel: No parameter is trainable, one cannot be averaged or has no values, or elements share memory.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UnsupportedModel(
            "the model has no trainable parameter: expected at least one requires_grad=True"
        )
    for inner_name, parameter in model.named_parameters():
        name = original_name(inner_name)
        if is_dtensor(parameter) and not sharded:
            raise UnsupportedModel(
                f"parameter {name!r} is a DTensor: expected ordinary parameters; for a model that fully_shard has "
                "sharded inside nodes, say across which ranks the job trains: DataParallel(..., mesh=mesh['node'])"
            )
        if is_lazy(parameter) or parameter.is_meta:
            raise UnsupportedModel(
                f"parameter {name!r} has no values yet: expected a complete model; run a forward pass (lazy modules) "
                "or materialise it (meta device) before making the optimizer and wrapping"
            )
        if not is_dtensor(parameter):
            _check_values(f"parameter {name!r}", parameter)
        if parameter.requires_grad and parameter.dtype not in _TRAINABLE_DTYPES:
            advice = {
                torch.float16: "float16 needs loss scaling (GradScaler), which is not supported; use bfloat16",
                torch.complex64: "store complex values as pairs of real ones",
                torch.complex128: "store complex values as pairs of real ones",
            }.get(parameter.dtype, "freeze it with requires_grad_(False), or convert it")
            raise UnsupportedModel(
                f"parameter {name!r} has dtype {parameter.dtype}: expected one of {_TRAINABLE_DTYPES}; {advice}"
            )
    for name, buffer in model.named_buffers():
        _check_values(f"buffer {original_name(name)!r}", buffer)
    check_memory([*model.named_parameters(), *model.named_buffers()])


def _check_values(what: str, tensor: torch.Tensor) -> None:
    kinds = {
        "no values yet": tensor.is_meta,
        "quantized values": tensor.is_quantized,
        "nested values": tensor.is_nested,
        f"layout {tensor.layout}": tensor.layout is not torch.strided,
        "lazily conjugated values": tensor.is_conj(),
    }
    if kind := next((kind for kind, is_so in kinds.items() if is_so), None):
        raise UnsupportedModel(
            f"{what} has {kind}: expected a dense tensor, which ranks can copy from rank 0; materialise it, "
            "or keep it in an attribute that is neither parameter nor buffer"
        )
