"""The contract of a wire format: how values become bytes for their way to other ranks, and values again.

PlainWire    every value alone, in one dtype
PackedWire   blocks of values, packed into fewer bytes, with error feedback; `stretto.exchange.int8` is an example
"""

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from stretto.errors import ConfigError
from stretto.flat import ALIGNMENT


class Wire(ABC):
    """A format in which gradients are sent, and the plain format in which everything else does."""

    name: str
    """As `Options(wire=...)` and the command line call it."""
    is_unbiased: ClassVar[bool] = False
    """Whether it draws random numbers such that, on average over draws, the received values equal the sent values."""
    fits_gradients: ClassVar[bool] = True
    """Whether gradients may be sent in it, and not only averages of replicas and changes of parameters."""

    @property
    @abstractmethod
    def values(self) -> "PlainWire":
        """The format of parameters, sums and averages: a value that is sent once has no later message to carry its
        error.
        """

    @property
    def for_averages(self) -> "Wire":
        """The format in which replicas send their changes: this format, or a format of as many bytes with a lower
        loss.
        """
        return self

    def drawn(self, stream: str, round_index: int, *ranks: int) -> Self:
        """Return the format of what ranks send of a stream in a round: this one, unless it draws random numbers.

        These are a function of the arguments. So receivers know the draws of a sender, and a repeated transfer has
        the same bits.

        Args:
            stream: Name of the transfer.
            round_index: Of the round.
            ranks: The sender, for each of the equally long rows that are written or read at once. The bits of a row
                do not depend on the others.
        """
        return self

    @abstractmethod
    def of(self, storage: torch.dtype) -> "Wire":
        """Return the format for values that are stored in this dtype."""

    @abstractmethod
    def write(self, values: Tensor, content: Tensor) -> None:
        """Write values into bytes.

        Args:
            values: `(numel,)`, a multiple of `ALIGNMENT`; they stay as they are.
            content: `(num_bytes(numel),)`, uint8; overwritten.
        """

    @abstractmethod
    def read(self, content: Tensor) -> Tensor:
        """Return the values, `(numel,)`, that `write` has written into `content`; it may be a view."""

    @abstractmethod
    def num_bytes(self, numel: int) -> int:
        """Return the bytes of `numel` values."""

    @property
    def bytes_per_value(self) -> float:
        """Of a bucket: the block of every format divides `ALIGNMENT`."""
        return self.num_bytes(ALIGNMENT) / ALIGNMENT


@dataclasses.dataclass(frozen=True, slots=True)
class PlainWire(Wire):
    """Every value alone, in `dtype` or in its stored dtype if that is narrower."""

    name: str
    dtype: torch.dtype
    """A wider one than values are stored in would add bytes and no bits."""

    @property
    def values(self) -> "PlainWire":
        """The same format."""
        return self

    def of(self, storage: torch.dtype) -> "PlainWire":
        """Return the format for values that are stored in this dtype."""
        return self if self.dtype.itemsize < storage.itemsize else PlainWire(self.name, storage)

    def write(self, values: Tensor, content: Tensor) -> None:
        """Write values into bytes."""
        content.view(self.dtype).copy_(values)

    def read(self, content: Tensor) -> Tensor:
        """Return a view of the values in `content`."""
        return content.view(self.dtype)

    def num_bytes(self, numel: int) -> int:
        """Return the bytes of `numel` values."""
        return numel * self.dtype.itemsize


FP32 = PlainWire("fp32", torch.float64)
"""All bits: float32 values are sent in 32 bits, and float64 values in 64."""
BF16 = PlainWire("bf16", torch.bfloat16)


class PackedWire(Wire):
    """Blocks of values, packed into fewer bytes; the base of formats that a subclass describes.

    A subclass sets `name`, `block` and `block_bytes`, and says how blocks are packed and unpacked. It has no state. The
    exchange does the rest: error feedback (`stretto.exchange.feedback`), unless the format is unbiased, sums in rank
    order, counting of bytes.

        Zeros unpack to zeros: a rank sends zeros for parameters that it has not used.
        Finite values unpack to finite values, the largest ones included.
        A block with a value that is not finite unpacks to at least one that is not: an owner must see it.
    """

    block: int
    """Values that are packed together; divides `ALIGNMENT`, so that no block is in two parameters or two slices."""
    block_bytes: int
    """Bytes of a packed block, with everything that is needed to unpack it."""

    def __init_subclass__(cls) -> None:
        """Check the size of a block.

        Raises:
            ConfigError: Some blocks would be in two parameters.
        """
        if ALIGNMENT % cls.block:
            raise ConfigError(f"{cls.__name__}: expected a block that divides {ALIGNMENT}, found {cls.block}")

    @property
    def values(self) -> PlainWire:
        """bf16."""
        return BF16

    @property
    def has_residual(self) -> bool:
        """Whether ranks send with the next round what packing has lost of this one."""
        return not self.is_unbiased

    @abstractmethod
    def pack(self, blocks: Tensor, packed: Tensor) -> None:
        """Pack blocks of values.

        Args:
            blocks: `(n, block)`, float32; they stay as they are.
            packed: `(n, block_bytes)`, uint8; overwritten.
        """

    @abstractmethod
    def unpack(self, packed: Tensor) -> Tensor:
        """Return the blocks, `(n, block)` in float32, that `packed`, `(n, block_bytes)` of uint8, holds."""

    def of(self, storage: torch.dtype) -> "PackedWire":
        """Return the same format for every dtype."""
        return self

    def kernels(self, tensor: Tensor) -> Any:
        """Return what packs a tensor faster, to the same bits: `write`, `read` and `lose`; None if nothing does."""
        return None

    def write(self, values: Tensor, content: Tensor) -> None:
        """Pack values into bytes."""
        if kernels := self.kernels(values):
            kernels.write(values, content)
        else:
            self.pack(values.to(torch.float32).view(-1, self.block), content.view(-1, self.block_bytes))

    def read(self, content: Tensor) -> Tensor:
        """Return the values that were packed into `content`."""
        kernels = self.kernels(content)
        return kernels.read(content) if kernels else self.unpack(content.view(-1, self.block_bytes)).view(-1)

    def lose(self, values: Tensor) -> None:
        """Replace values, `(numel,)`, by what packing loses of them."""
        if kernels := self.kernels(values):
            kernels.lose(values)
            return
        content = torch.empty(self.num_bytes(values.numel()), dtype=torch.uint8, device=values.device)
        self.write(values, content)
        values.sub_(self.read(content))

    def num_bytes(self, numel: int) -> int:
        """Return the bytes of `numel` values."""
        return numel // self.block * self.block_bytes


def block_scales(blocks: Tensor, largest: int, bits: int) -> Tensor:
    """Return a scale for each block, `(n, 1)`, such that its values are between `largest` times the scale.

        s = max |x| / largest,   q = round(x / s),   x ≈ s·q,   |x - s·q| ≤ s / 2

    Note [Short scales]
        A scale keeps `bits` bits, rounded towards zero. So s·q is exact in float32, the error x - s·q that feedback
        remembers is exact too, and `largest` times the scale does not overflow. For values below float32's smallest
        normal number the scale is that number, and they wait in the error until they are large enough.

    Args:
        blocks: `(n, block)`, float32. A block with a value that is not finite gets a scale that is not.
        largest: The largest integer |q|.
        bits: Of the scale, with the leading one; together with the bits of `largest`, at most 24.
    """
    scales = blocks.abs().amax(-1, keepdim=True)
    # By a tensor: by a number, CUDA multiplies with its reciprocal, which may have other last bits.
    scales.div_(torch.full((), largest, dtype=scales.dtype, device=scales.device))
    return short(scales.clamp_min_(torch.finfo(torch.float32).tiny), bits)


def short(scales: Tensor, bits: int) -> Tensor:
    """Return scales, float32, rounded towards zero to so many bits, with the leading one.

    All that are not numbers become the same: which it would be depends on the device.
    """
    dropped = 24 - bits
    shortened = (scales.view(torch.int32) >> dropped << dropped).view(torch.float32)
    return shortened.nan_to_num_(nan=math.nan, posinf=math.inf)
