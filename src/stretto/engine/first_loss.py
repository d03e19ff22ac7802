"""A check of the first loss of a job: whether it is scaled, or computed in float16.

Gradients of a scaled loss have a factor that Stretto does not divide out: it causes no error, but clipping, averages
of raw gradients and SGD are wrong by it. A factor alone proves nothing, because losses may have any. So Stretto
reports a factor only if a `GradScaler` in this process has it.
"""

import gc
import logging
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from stretto.errors import UsageError

_log = logging.getLogger("stretto")

NEAREST = 16
"""Number of nodes of the graph, starting with the loss's own, that are searched for a scaler's factor."""


def check_first_loss(loss: Tensor, where: object) -> None:
    """Search the graph of `loss`, before its backward pass.

    Raises:
        UsageError: A `GradScaler` has scaled it.
    """
    nodes = list(_graph(loss))
    factors = [float(factor) for node in nodes[:NEAREST] for factor in _factors(node)]
    if factors and (scale := next((scale for scale in _scales() if scale in factors), None)):
        raise UsageError(
            f"{where}: a GradScaler has multiplied the loss by {scale}, and Stretto does not divide the gradients by "
            "it: remove the GradScaler, and use bfloat16, which needs no scaling, instead of float16"
        )
    if any(place.dtype is torch.float16 for node in nodes for place in getattr(node, "_input_metadata", ())):
        _log.warning(
            "%s: the loss is computed in float16, where small gradients become zero without loss scaling; "
            "Stretto has no loss scaling: use bfloat16",
            where,
        )


def _graph(loss: Tensor) -> Iterator[Any]:
    """Yield the nodes of a backward pass, the nearest to the loss first."""
    waiting, seen = deque([loss.grad_fn]), {loss.grad_fn, None}
    while waiting:
        yield (node := waiting.popleft())
        for before, _ in node.next_functions if node else ():
            if before not in seen:
                seen.add(before)
                waiting.append(before)


def _factors(node: Any) -> list[Tensor]:
    """Return the factors in a node that may be a scaler's: scalar tensors that are not trained.

    A scaler keeps its factor in float32; a Python number in a user's loss becomes a tensor of 64 bits.
    """
    if node.name() != "MulBackward0":
        return []
    factors = (getattr(node, "_saved_self", None), getattr(node, "_saved_other", None))
    return [
        f
        for f in factors
        if f is not None and f.dim() == 0 and f.dtype is torch.float32 and not f.requires_grad
    ]


def _scales() -> Iterator[float]:
    """Yield the factors of all `GradScaler`s of this process, except factors of 1."""
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.amp.GradScaler) and (scale := thing.get_scale()) != 1:
            yield scale
