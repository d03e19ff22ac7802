"""The interface of a wire format: how values become bytes for sending, and values again.

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
    """A format for gradients, with the plain format for all other values."""

    name: str
    """Name in `Options(wire=...)` and on the command line."""
    is_unbiased: ClassVar[bool] = False
    """Whether it draws random numbers such that the mean of received values over draws equals the sent values."""
    fits_gradients: ClassVar[bool] = True
    """Whether it is allowed for gradients, and not only for averages of replicas and changes of parameters."""

    @property
    @abstractmethod
    def values(self) -> "PlainWire":
        """The format of parameters, sums and averages: a value that is sent once has no later message for its error."""

    @property
    def for_averages(self) -> "Wire":
        """The format for changes of replicas: this format, or one of equal size with a lower loss."""
        return self

    def drawn(self, stream: str, round_index: int, *ranks: int) -> Self:
        """Return the format of a stream in a round: this format itself, unless it draws random numbers.

        The draws are a function of the arguments, so receivers know the draws of a sender, and a repeated transfer has
        the same bits.

        Args:
            stream: Name of the transfer.
            round_index: Index of the round.
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
            values: `(numel,)`, a multiple of `ALIGNMENT`; not changed.
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
        """Bytes per value of a bucket, exact because the block of every format divides `ALIGNMENT`."""
        return self.num_bytes(ALIGNMENT) / ALIGNMENT


@dataclasses.dataclass(frozen=True, slots=True)
class PlainWire(Wire):
    """A format that sends every value alone, in `dtype` or in its stored dtype if that is narrower."""

    name: str
    dtype: torch.dtype
    """Dtype on the wire; a wider dtype than the stored one would only add bytes."""

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

    A subclass sets `name`, `block` and `block_bytes`, and implements packing and unpacking of blocks. It has no state.
    The exchange does the rest: error feedback (`stretto.exchange.feedback`), unless the format is unbiased, sums in
    rank order, counting of bytes.

        Zeros unpack to zeros: a rank sends zeros for parameters that it has not used.
        Finite values unpack to finite values, the largest ones included.
        A block with a value that is not finite unpacks to at least one that is not: an owner must see it.
    """

    block: int
    """Number of values that are packed together; divides `ALIGNMENT`, so that no block spans two parameters or
    slices."""
    block_bytes: int
    """Bytes of a packed block, including all data needed to unpack it."""

    def __init_subclass__(cls) -> None:
        """Check the size of a block.

        Raises:
            ConfigError: Some blocks would be in two parameters.
        """
        if ALIGNMENT % cls.block:
            raise ConfigError(f"{cls.__name__}: expected a block that divides {ALIGNMENT}, found {cls.block}")

    @property
    def values(self) -> PlainWire:
        """The format bf16."""
        return BF16

    @property
    def has_residual(self) -> bool:
        """Whether ranks send the packing error of a round with the next round."""
        return not self.is_unbiased

    @abstractmethod
    def pack(self, blocks: Tensor, packed: Tensor) -> None:
        """Pack blocks of values.

        Args:
            blocks: `(n, block)`, float32; not changed.
            packed: `(n, block_bytes)`, uint8; overwritten.
        """

    @abstractmethod
    def unpack(self, packed: Tensor) -> Tensor:
        """Return the blocks, `(n, block)` in float32, that `packed`, `(n, block_bytes)` of uint8, holds."""

    def of(self, storage: torch.dtype) -> "PackedWire":
        """Return the same format for every dtype."""
        return self

    def kernels(self, tensor: Tensor) -> Any:
        """Return an object with faster `write`, `read` and `lose`, bit-identical to this wire's; None if there is
        none.
        """
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
        """Replace values, `(numel,)`, by their packing errors."""
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
        blocks: `(n, block)`, float32. A block with a value that is not finite gets a scale that is not finite.
        largest: The largest integer |q|.
        bits: Bits of the scale, including the leading one; together with the bits of `largest`, at most 24.
    """
    scales = blocks.abs().amax(-1, keepdim=True)
    # By a tensor: by a number, CUDA multiplies with its reciprocal, which may have other last bits.
    scales.div_(torch.full((), largest, dtype=scales.dtype, device=scales.device))
    return short(scales.clamp_min_(torch.finfo(torch.float32).tiny), bits)


def short(scales: Tensor, bits: int) -> Tensor:
    """Return scales, float32, rounded towards zero to this number of bits, including the leading one.

    All that are not numbers become the same: which it would be depends on the device.
    """
    dropped = 24 - bits
    shortened = (scales.view(torch.int32) >> dropped << dropped).view(torch.float32)
    return shortened.nan_to_num_(nan=math.nan, posinf=math.inf)
