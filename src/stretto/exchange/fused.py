"""Formats with kernels in addition to PyTorch's operations, which define the formats.

Kernels for NVIDIA GPUs are in Triton, which comes with PyTorch for CUDA; kernels for CPUs are in C. They are imported
when a tensor on such a device is packed for the first time. Where they cannot be used, torch's operations do.
"""

import functools
import importlib
import warnings
from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from stretto.exchange.wire import PackedWire

# Number of blocks that a kernel must pack like PyTorch's operations before it is used on a device.
_TRIED = 1024


class FusedWire(PackedWire):
    """A packed wire whose `pack` and `unpack` have kernels with the same bits."""

    block = 64
    arguments: tuple[Any, ...] = ()
    """Arguments of the constructor for an equal format."""
    modules: ClassVar[Mapping[str, str]] = MappingProxyType({"cuda": "stretto.exchange.kernels"})
    """Modules with its kernels, by the type of device."""

    def kernels(self, tensor: Tensor) -> "Kernels | None":
        """Return the kernels for a tensor; None if PyTorch's operations pack it."""
        if tensor.device.type not in self.modules or not tensor.is_contiguous():
            return None
        module = _usable(type(self), self.arguments, tensor.device)
        return None if module is None else Kernels(self, module)

    @abstractmethod
    def launch_pack(self, kernels: Any, values: Tensor, content: Tensor) -> None:
        """Do the same as `write`, with a module of kernels; all tensors are contiguous."""

    @abstractmethod
    def launch_unpack(self, kernels: Any, content: Tensor) -> Tensor:
        """Do the same as `read`."""

    def launch_lose(self, kernels: Any, values: Tensor) -> None:
        """Do the same as `lose`; not called without a residual."""
        raise NotImplementedError


class Kernels:
    """The kernels of a wire, which replace its own methods.

    Args:
        wire: The format.
        module: The module with its kernels.
    """

    def __init__(self, wire: FusedWire, module: Any) -> None:
        self._wire, self._module = wire, module

    def write(self, values: Tensor, content: Tensor) -> None:
        """Pack values into bytes."""
        self._wire.launch_pack(self._module, values, content)

    def read(self, content: Tensor) -> Tensor:
        """Return the values that were packed into `content`."""
        return self._wire.launch_unpack(self._module, content)

    def lose(self, values: Tensor) -> None:
        """Replace values by their packing errors."""
        self._wire.launch_lose(self._module, values)


@functools.cache
def _usable(kind: type[FusedWire], arguments: tuple[Any, ...], device: torch.device) -> Any:
    """Return the module of kernels if there is a compiler, and if a format's kernels give the right bits on this
    device.
    """
    try:
        kernels = importlib.import_module(kind.modules[device.type])
    except ImportError:
        return None
    wire = kind(*arguments).drawn("sums", 0, 0, 1)
    try:
        if has_right_bits(wire, kernels, device):
            return kernels
        reason = "has other bits than torch's operations"
    except (
        Exception
    ) as error:  # there may be no compiler of C, which Triton needs, and compilers raise anything
        reason = f"cannot be used ({type(error).__name__}: {error})"
    warnings.warn(
        f"the kernel that packs {wire.name} on {device} {reason}: the operations of torch pack instead, which "
        "is slower",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def has_right_bits(wire: FusedWire, kernels: Any, device: torch.device) -> bool:
    """Return whether kernels and PyTorch's operations agree on some random blocks."""
    draws = torch.Generator().manual_seed(0)
    sizes = torch.randint(-130, 120, (_TRIED, 1), generator=draws, device="cpu")
    blocks = torch.randn(_TRIED, wire.block, generator=draws, device="cpu").ldexp(sizes).to(device)
    expected = torch.zeros(_TRIED, wire.block_bytes, dtype=torch.uint8, device=device)
    packed, lost = torch.zeros_like(expected), blocks.clone()
    wire.pack(blocks, expected)
    wire.launch_pack(kernels, blocks.view(-1), packed.view(-1))
    arrived = wire.unpack(expected)
    right = torch.equal(packed, expected)
    right &= torch.equal(wire.launch_unpack(kernels, expected.view(-1)), arrived.view(-1))
    if wire.has_residual:
        wire.launch_lose(kernels, lost.view(-1))
        right &= torch.equal(lost, blocks - arrived)
    return right
