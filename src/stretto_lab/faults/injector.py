"""The injector of one rank: it counts opportunities, damages values as planned, and records the damage.

It writes through an alias of the memory, so that no version counter notices.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stretto.checksums import digest, hexadecimal
from stretto.errors import ConfigError
from stretto_lab.faults.plan import Fault, FaultPlan, Site


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Application:
    """One occurrence of a fault: when it happened and what it changed."""

    fault: Fault
    opportunity: int
    """Index of the opportunity at this site on this rank, from 0."""
    step: int
    """Number of updates the job had committed; 0 for groups without a job."""
    elements: int
    """Number of damaged elements."""
    span: tuple[float, float]
    """Start of the first and end of the last damaged element, as shares of the tensor's length."""
    before: str
    """Digest of the tensor before, hexadecimal."""
    after: str

    @property
    def changed(self) -> bool:
        """Whether any bit changed: setting a zero to zero changes none."""
        return self.before != self.after


class Injector:
    """Injects one rank's faults of a plan.

    Args:
        plan: The plan of the whole run.
        rank: This rank, as the plan numbers ranks.
    """

    def __init__(self, plan: FaultPlan, rank: int) -> None:
        self._faults = plan.of_rank(rank)
        self._opportunities: Counter[Site] = Counter()
        self._held: dict[tuple[Site, int], Tensor] = {}
        self.applications: list[Application] = []
        """All occurrences so far, in order."""
        self.committed: Callable[[Site], int] = lambda _: 0
        """Returns the number of updates that the job has committed, as counted by the lane that uses the site."""

    def is_interested(self, site: Site) -> bool:
        """Return whether the plan has a fault for this site."""
        return any(fault.site == site for fault in self._faults)

    def opportunities(self, site: Site) -> int:
        return self._opportunities[site]

    def offer(self, site: Site, tensors: Sequence[Tensor]) -> None:
        """Count an opportunity, and inject the faults that are due.

        Args:
            site: The kind of the tensors.
            tensors: Contiguous tensors on any device; a fault damages one of them, drawn from its seed.
        """
        opportunity = self._opportunities[site]
        self._opportunities[site] += 1
        if not self.is_interested(site):
            return
        full = [tensor for tensor in tensors if tensor.numel()]
        healthy = [alias_of(tensor).clone() for tensor in full if self._keeps_stale(site)]
        for fault in self._faults:
            if full and fault.site == site and fault.is_on(opportunity):
                self._strike(fault, opportunity, full)
        for index, values in enumerate(healthy):
            self._held[site, index] = values

    def _strike(self, fault: Fault, opportunity: int, tensors: Sequence[Tensor]) -> None:
        generator = torch.Generator().manual_seed((fault.seed or 0) * 1_000_003 + opportunity)
        # Larger tensors are hit more often, as memory is.
        sizes = torch.tensor([tensor.numel() for tensor in tensors], dtype=torch.float64)
        index = int(torch.multinomial(sizes, 1, generator=generator))
        tensor = tensors[index]
        values = alias_of(tensor)
        chosen = places(values, fault, generator)
        held = self._held.get((fault.site, index))
        is_alike = held is not None and held.shape == values.shape and held.dtype == values.dtype
        selected = values[chosen].cpu()  # where the draws are made
        stale = held[chosen].cpu() if held is not None and is_alike else torch.zeros_like(selected)
        before = digest(tensor)
        values[chosen] = damaged(selected, fault, stale, generator).to(values.device)
        self.applications.append(
            Application(
                fault=fault,
                opportunity=opportunity,
                step=self.committed(fault.site),
                elements=chosen.numel(),
                span=(int(chosen.min()) / values.numel(), (int(chosen.max()) + 1) / values.numel()),
                before=hexadecimal(before),
                after=hexadecimal(digest(tensor)),
            )
        )

    def _keeps_stale(self, site: Site) -> bool:
        return any(fault.site == site and fault.pattern == "stale" for fault in self._faults)


# What becomes of the values

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_RUN = 4
"""Number of elements in a run: as many as one faulty execution unit of a GPU was seen to damage."""
_PAGE_BYTES = 4096
"""Bytes of a memory page on common processors."""


def alias_of(tensor: Tensor) -> Tensor:
    """Return a flat view of a tensor's memory without its version counter: writing to it does not count as a write.

    Bytes are viewed as float32 where possible, because tensors of bytes on the wire hold values or equally wide
    numbers.

    Raises:
        ConfigError: The memory is not contiguous.
    """
    if not tensor.is_contiguous():
        raise ConfigError(f"a fault for a tensor with strides {tensor.stride()}: expected contiguous values")
    content = tensor.data.view(-1).view(torch.uint8)  # `detach` would share the counter
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
    if fault.extent == "page":
        return _pages(values, 2 if fault.pattern == "swapped" else 1, generator)
    wanted = {"element": 1, "run": _RUN, "chunk": max(1, fault.chunk_bytes // values.element_size())}
    count = min(numel, wanted[fault.extent])
    start = int(torch.randint(numel - count + 1, (), generator=generator))
    return torch.arange(start, start + count)


def _pages(values: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return the indices of the elements of `count` pages, or all indices if there are fewer pages."""
    length = _PAGE_BYTES // values.element_size()
    pages = torch.arange(values.numel() // length * length).view(-1, length)
    if len(pages) < count:
        return torch.arange(values.numel())
    return pages[torch.randperm(len(pages), generator=generator)[:count]].flatten()


def damaged(selected: Tensor, fault: Fault, stale: Tensor, generator: torch.Generator) -> Tensor:
    """Return the damaged values of the selected elements.

    Args:
        selected: The values, `(count,)`.
        fault: The fault; its pattern decides.
        stale: The values of the same elements at the last opportunity; zeros if there was none.
        generator: Draws the bits.
    """
    half = selected.numel() // 2
    match fault.pattern:
        case "flip" | "word" | "misread":
            return _with_wrong_bits(selected, fault, generator)
        case "stale":
            return stale
        case "shifted":
            return selected.roll(1)
        case "duplicated":
            return torch.cat([selected[: selected.numel() - half], selected[:half]])
        case "swapped":
            return torch.cat([selected[half:], selected[:half]])
        case "sign":
            return selected.neg()
        case "scale":
            small = max(1e-3, 2 * torch.finfo(selected.dtype).eps)
            return (selected * (1 + small)).to(selected.dtype)
        case "power":
            return (selected * 256).to(selected.dtype)
        case _:
            return torch.full_like(selected, _CONSTANTS[fault.pattern])


_CONSTANTS = {"zero": 0.0, "huge": 1e38, "infinity": torch.inf, "nan": torch.nan}
"""Patterns that write one value everywhere."""


def _with_wrong_bits(selected: Tensor, fault: Fault, generator: torch.Generator) -> Tensor:
    words = selected.clone().view(_INTEGERS[selected.element_size()])
    if fault.pattern == "flip":
        wrong = words ^ _masks(words, fault.bits, generator)
    elif fault.pattern == "word":
        wrong = words.random_(generator=generator)
    else:  # misread: bytes in the other order
        wrong = words.view(torch.uint8).view(selected.numel(), -1).flip(1).contiguous().view(-1)
    return wrong.view(selected.dtype)


def _masks(words: Tensor, bits: int, generator: torch.Generator) -> Tensor:
    """Return a mask for every word, with `bits` random bits set, or all bits of a shorter word."""
    width = 8 * words.element_size()
    masks = torch.zeros_like(words)
    for row in range(words.numel()):
        chosen = torch.randperm(width, generator=generator)[:bits].tolist()
        mask = sum(1 << bit for bit in chosen)
        is_negative = words.dtype != torch.uint8 and mask >> (width - 1)  # in two's complement
        masks[row] = mask - (1 << width) if is_negative else mask
    return masks
