"""What a model holds beside what is trained."""

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from stretto.flat import original_name


def untrained(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the frozen parameters and the buffers of a model, with their names."""
    frozen = ((name, p) for name, p in model.named_parameters() if not p.requires_grad)
    buffers = ((name, value) for name, value in model.named_buffers() if isinstance(value, Tensor))
    return [(original_name(name), tensor.detach()) for name, tensor in (*frozen, *buffers)]


def has_bytes(value: Any) -> TypeGuard[Tensor]:
    """Return whether it is a tensor with memory that can be looked at: not sparse, nested, quantized or on meta."""
    is_dense = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
    return is_dense and not (value.is_nested or value.is_quantized)
