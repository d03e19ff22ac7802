"""How values are damaged, in place, behind the back of everything that counts writes."""

import torch
from torch import Tensor

from stretto.errors import ConfigError
from stretto.faults.plan import Fault

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_RUN = 4
"""Elements of a run: what one faulty execution unit of a GPU was seen to damage."""


def alias_of(tensor: Tensor) -> Tensor:
    """Return a flat view of a tensor's memory that shares nothing else: writing it counts as no write of the tensor.

    Bytes are taken for float32 where they can be: what travels as bytes holds values, or numbers of as many bits.

    Raises:
        ConfigError: The memory is not the host's, or not in one piece.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ConfigError(
            f"a fault for a tensor on {tensor.device} with strides {tensor.stride()}: expected contiguous values in "
            "the host's memory"
        )
    content = torch.from_numpy(tensor.detach().view(-1).view(torch.uint8).numpy())
    if tensor.dtype not in (torch.uint8, torch.int8):
        return content.view(tensor.dtype)
    is_values = content.numel() >= 4 and content.data_ptr() % 4 == 0
    return content[: content.numel() // 4 * 4].view(torch.float32) if is_values else content


def places(values: Tensor, fault: Fault, generator: torch.Generator) -> Tensor:
    """Return the indices of the elements that `fault` damages."""
    numel = values.numel()
    if fault.extent == "all":
        return torch.arange(numel)
    if fault.extent == "fraction":
        return torch.randperm(numel, generator=generator)[: max(1, int(fault.fraction * numel))]
    wanted = {"element": 1, "run": _RUN, "chunk": max(1, fault.chunk_bytes // values.element_size())}
    count = min(numel, wanted[fault.extent])
    start = int(torch.randint(numel - count + 1, (), generator=generator))
    return torch.arange(start, start + count)


def damaged(selected: Tensor, fault: Fault, stale: Tensor, generator: torch.Generator) -> Tensor:
    """Return what becomes of the selected elements.

    Args:
        selected: Their values, `(count,)`.
        fault: With its pattern.
        stale: What the same places held at the last opportunity; zeros where there was none.
        generator: Draws bits and noise.
    """
    words = selected.clone().view(_INTEGERS[selected.element_size()])
    half = selected.numel() // 2
    match fault.pattern:
        case "flip":
            return (words ^ _masks(words, fault.bits, generator)).view(selected.dtype)
        case "word":
            return words.random_(generator=generator).view(selected.dtype)
        case "stale":
            return stale
        case "shifted":
            return selected.roll(1)
        case "duplicated":
            return torch.cat([selected[: selected.numel() - half], selected[:half]])
        case "swapped":
            return torch.cat([selected[half:], selected[:half]])
        case "misread":
            octets = selected.clone().view(torch.uint8).view(selected.numel(), -1).flip(1)
            return octets.contiguous().view(-1).view(selected.dtype)
        case "noise":
            noise = torch.randn(selected.shape, generator=generator).mul_(fault.variance**0.5)
            return noise.add_(selected.float()).to(selected.dtype)
        case _:
            return _multiplied(selected, fault)


def _multiplied(selected: Tensor, fault: Fault) -> Tensor:
    """Return what a wrong value, sign or scale makes of elements."""
    match fault.pattern:
        case "zero":
            return torch.zeros_like(selected)
        case "sign":
            return selected.neg()
        case "scale":
            small = max(1e-3, 2 * torch.finfo(selected.dtype).eps)
            return (selected * (1 + small)).to(selected.dtype)
        case "power":
            return (selected * 256).to(selected.dtype)
        case "huge":
            return torch.full_like(selected, 1e38)
        case "infinity":
            return torch.full_like(selected, torch.inf)
        case _:
            return torch.full_like(selected, torch.nan)


def _masks(words: Tensor, bits: int, generator: torch.Generator) -> Tensor:
    """Return a mask per word with at most the word's width, else `bits`, random bits set."""
    width = 8 * words.element_size()
    masks = torch.zeros_like(words)
    for row in range(words.numel()):
        chosen = torch.randperm(width, generator=generator)[:bits].tolist()
        mask = sum(1 << bit for bit in chosen)
        signed = mask - (1 << width) if words.dtype != torch.uint8 and mask >> (width - 1) else mask
        masks[row] = signed
    return masks
