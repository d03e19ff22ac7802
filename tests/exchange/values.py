"""Random float32 values of every size, and blocks of them."""

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float32).max


def of_every_size(numel: int, generator: torch.Generator, *, largest: float = LARGEST) -> Tensor:
    """Values from denormal to `largest`, zeros among them; their sizes are spread evenly over the exponents, or alike.

    Args:
        numel: How many.
        generator: Draws them.
        largest: No value is larger.
    """
    draw = int(torch.randint(4, (), generator=generator))
    if draw == 0:  # of one size
        exponents = torch.randint(-149, 128, (), generator=generator).expand(numel)
    else:
        exponents = torch.randint(-149, 128, (numel,), generator=generator)
    mantissas = 1 + torch.rand(numel, generator=generator, dtype=torch.float64)
    signs = 1 - 2 * torch.randint(2, (numel,), generator=generator)
    values = (signs * mantissas * 2.0 ** exponents.double()).clamp_(-largest, largest).float()
    if draw == 1:
        values[torch.rand(numel, generator=generator) < 0.9] = 0.0
    if draw == 2:
        values[torch.randint(numel, (), generator=generator)] = largest
    return values
