"""Wire formats: how wide values are that travel."""

from typing import Literal

import torch

WireFormat = Literal["fp32", "bf16", "int8"]


def wire_dtype(wire: WireFormat) -> torch.dtype:
    """Return the dtype in which a wire format sends parameters; int8 is for gradients."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.bfloat16}[wire]


def narrower(wire: torch.dtype, storage: torch.dtype) -> torch.dtype:
    """Return the dtype in which `storage` values travel: a wire wider than what is stored adds bytes, no bits."""
    return wire if wire.itemsize < storage.itemsize else storage
