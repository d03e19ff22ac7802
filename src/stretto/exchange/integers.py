"""Formats of 64 integers that share a scale: the constants for kernels."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from stretto.exchange.fused import FusedWire


class IntegerWire(FusedWire):
    """A format of integers and a scale for each block, which a subclass describes.

    A packed block is a row of words, which hold integers, the first one in the lowest bits; the last word is the scale,
    the upper bits of a float32.
    """

    largest: ClassVar[int]
    """The largest integer |q|."""
    bits: ClassVar[int]
    """Bits of an integer."""
    zero: ClassVar[int]
    """Offset that makes an integer non-negative; 0 keeps its sign in its bits."""
    word_bits: ClassVar[int]
    """Bits of a word, and of the stored part of a scale."""
    scale_bits: ClassVar[int]
    """Bits of a scale, including the leading one; see `block_scales`."""
    of_mean: ClassVar[bool] = False
    """Whether the scale is the one for averages, Σ x² / Σ |x|; see `stretto.exchange.int2`."""

    def launch_pack(self, kernels: Any, values: Tensor, content: Tensor) -> None:
        """Pack values into bytes."""
        kernels.pack_integers(values, content, self.format)

    def launch_unpack(self, kernels: Any, content: Tensor) -> Tensor:
        """Return the values that were packed into `content`."""
        numel = content.numel() // self.block_bytes * self.block
        values = torch.empty(numel, dtype=torch.float32, device=content.device)
        kernels.unpack_integers(content, values, self.format)
        return values

    def launch_lose(self, kernels: Any, values: Tensor) -> None:
        """Replace values by their packing errors."""
        kernels.lose_integers(values, self.format)

    @property
    def format(self) -> dict[str, Any]:
        """All these constants, by name."""
        return {name: getattr(self, name) for name in _NUMBERS}


_NUMBERS = ("largest", "zero", "bits", "word_bits", "scale_bits", "of_mean")
