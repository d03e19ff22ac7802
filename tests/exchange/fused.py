"""The law of kernels for GPUs: their bits are those of torch's operations on a processor, whatever is packed.

    python -m tests.exchange.fused

The kernels run on a GPU where there is one, or else in Triton's interpreter, with TRITON_INTERPRET=1.
"""

import importlib
import warnings
from typing import Any

import torch
from torch import Tensor

from stretto.exchange import WIRES
from stretto.exchange.blocks import block_sums
from stretto.exchange.fused import FusedWire
from stretto.flat import ALIGNMENT
from tests.exchange.values import of_every_size

CASES = 210
DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.float16)
NOT_FINITE = torch.tensor([torch.nan, torch.inf, -torch.inf])
FUSED = [
    wire
    for found in WIRES.values()
    for wire in dict.fromkeys((found, found.for_averages))
    if isinstance(wire, FusedWire)
]


def random_case(case: int) -> Tensor:
    """Values of every size and dtype; among them blocks of zeros, and values that are not finite."""
    generator = torch.Generator().manual_seed(case)
    blocks = int(torch.randint(40, (), generator=generator))
    if not blocks:
        return torch.zeros(0)
    values = of_every_size(ALIGNMENT * blocks, generator)
    values.view(-1, ALIGNMENT)[int(torch.randint(blocks, (), generator=generator))] *= case % 3
    if case % 4 == 1:
        places = torch.randint(values.numel(), (3,), generator=generator)
        values[places] = NOT_FINITE[torch.randint(3, (3,), generator=generator)]
    return values.to(DTYPES[case % len(DTYPES)])


def same(found: Tensor, expected: Tensor) -> bool:
    """To the bit; all that are not numbers are alike: which one it is depends on the device."""
    found, expected = found.cpu(), expected.cpu()
    is_number = ~expected.isnan()
    return (
        found.dtype == expected.dtype
        and torch.equal(~found.isnan(), is_number)
        and torch.equal(found[is_number], expected[is_number])
        and torch.equal(found[is_number].signbit(), expected[is_number].signbit())
    )


def compare(wire: FusedWire, kernels: Any, device: torch.device, cases: int = CASES) -> list[str]:
    """Return what differs from torch's operations on a processor: the case, and in which direction."""
    wrong = []
    for case in range(cases):
        values = random_case(case)
        rows = next(rows for rows in (3, 2, 1) if values.numel() % (rows * ALIGNMENT) == 0)
        wire = wire.drawn("sums", case, *range(case, case + rows))
        expected = torch.zeros(wire.num_bytes(values.numel()), dtype=torch.uint8)
        blocks = values.to(torch.float32).view(-1, ALIGNMENT)
        wire.pack(blocks, expected.view(-1, wire.block_bytes))
        arrived = wire.unpack(expected.view(-1, wire.block_bytes)).view(-1)

        there, packed = values.to(device, copy=True), torch.full_like(expected, 171, device=device)
        wire.launch_pack(kernels, there, packed)
        wrong += [f"{case}: packed"] * (not torch.equal(packed.cpu(), expected.cpu()))
        wrong += [f"{case}: overwritten"] * (not same(there, values))
        found = wire.launch_unpack(kernels, expected.to(device))
        wrong += [f"{case}: unpacked"] * (not same(found, arrived))
        if wire.has_residual and values.dtype.itemsize >= 4:
            wire.launch_lose(kernels, there)
            wrong += [f"{case}: lost"] * (not same(there, values.sub_(arrived)))
    return wrong


def norms_differ(kernels: Any, device: torch.device) -> list[str]:
    """Return the cases in which a norm, which a packed scale would hide, has other bits."""
    wrong = []
    for case in range(CASES):
        values = random_case(case)
        small = torch.empty(values.numel() // ALIGNMENT, ALIGNMENT, device=device)
        largest, norms, widths = torch.empty(3, len(small), device=device)
        kernels.shrink(
            values.to(device),
            small,
            largest,
            norms,
            widths,
            torch.full((ALIGNMENT,), 0.5, device=device),
            4000,
        )
        expected = block_sums(small.cpu().square()).double().sqrt().float().view(-1)
        wrong += [f"{case}: norms"] * (not same(norms, expected))
    return wrong


def main() -> None:
    """Exit with what differs, by format, where something does."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    warnings.simplefilter("ignore", RuntimeWarning)  # of NumPy, which interprets, about what is not finite
    kernels = importlib.import_module("stretto.exchange.kernels")
    found = {f"{type(wire).__name__} {wire.name}": compare(wire, kernels, device) for wire in FUSED}
    found["norms"] = norms_differ(kernels, device)
    raise SystemExit("\n".join(f"{name}: {wrong[:5]}" for name, wrong in found.items() if wrong) or 0)


if __name__ == "__main__":
    main()
