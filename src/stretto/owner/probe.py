"""Finds out whether an optimizer may be sharded, by trying it on a small tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stretto.errors import UnsupportedOptimizer
from stretto.flat import ALIGNMENT
from stretto.owner.optimizer import rebuild

_ROWS, _COLUMNS = 4, ALIGNMENT
_STEPS = 3
_LEARNING_RATE = 0.01


def check_shardable(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless stepping a matrix whole equals stepping it cut into flat pieces, to the bit.

    Names prove nothing: what an optimizer does with the shape of a tensor, or across its elements, shows when
    the same gradients go through it whole and cut.

    Args:
        optimizer: The user's; it is rebuilt over probe tensors, never stepped.

    Raises:
        UnsupportedOptimizer: The results differ, or the optimizer cannot step flat tensors by itself.
    """
    name = type(optimizer).__name__
    try:
        whole = _run(optimizer, [(0, _ROWS * _COLUMNS)], (_ROWS, _COLUMNS))
        cut = _run(optimizer, [(0, ALIGNMENT), (ALIGNMENT, _ROWS * _COLUMNS)], (-1,))
    except UnsupportedOptimizer:
        raise
    except Exception as error:
        raise UnsupportedOptimizer(
            f"{name} cannot step a flat tensor by itself ({type(error).__name__}: {error}): expected an "
            "element-wise optimizer such as AdamW or SGD"
        ) from error
    if not torch.equal(whole, cut):
        raise UnsupportedOptimizer(
            f"{name} cannot be cut into shards: stepping a {_ROWS}x{_COLUMNS} tensor whole and in two flat "
            f"pieces differs by up to {float((whole - cut).abs().max()):.3g}; expected an element-wise optimizer "
            "such as AdamW or SGD"
        )


def _run(
    optimizer: torch.optim.Optimizer, ranges: Sequence[tuple[int, int]], shape: tuple[int, ...]
) -> Tensor:
    """Step the probe in the given pieces and return it flat."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_ROWS * _COLUMNS, generator=generator)
    pieces = [start[a:b].clone().view(shape).requires_grad_() for a, b in ranges]
    probe = rebuild(optimizer, [pieces, *([] for _ in optimizer.param_groups[1:])])
    # A warm-up may start at zero, where every optimizer looks harmless.
    for group in probe.param_groups:
        group["lr"] = _LEARNING_RATE
    for _ in range(_STEPS):
        gradient = torch.randn(_ROWS * _COLUMNS, generator=generator)
        for (a, b), piece in zip(ranges, pieces, strict=True):
            piece.grad = gradient[a:b].clone().view(shape)
        probe.step()
    return torch.cat([piece.detach().flatten() for piece in pieces])
