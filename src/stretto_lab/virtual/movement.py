"""The effect of collectives on tensors, once all ranks have called: a few operations per rank, not per pair of ranks.

Sums add in rank order, so that results do not depend on the order in which ranks call.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.errors import ConfigError
from stretto.exchange.exchange import sum_in_rank_order
from stretto.groups.collectives import Call

Movement = Callable[[Sequence[Call]], None]
"""Fills the outputs of all ranks' calls, given in rank order."""


def move(calls: Sequence[Call]) -> None:
    """Perform a collective.

    Args:
        calls: The calls of all ranks, which agree, in rank order.
    """
    method = calls[0].method
    movements = _OF_LISTS if method.is_listed else _OF_WHOLES
    with torch.no_grad():
        movements[method.operation.name](calls)


def reduction_name(call: Call) -> str:
    """Return the name of the reduction in a call.

    Raises:
        ConfigError: A virtual cluster does not perform it.
    """
    chosen = call.reduction
    for name, known, _ in _REDUCTIONS:
        if chosen == known:
            return name
    names = ", ".join(name for name, _, _ in _REDUCTIONS)
    raise ConfigError(f"a virtual cluster reduces by {names}, not {chosen}")


# Reductions


def _sum(contributions: Tensor) -> Tensor:
    total = torch.empty_like(contributions[0])
    sum_in_rank_order(contributions.reshape(len(contributions), total.numel()), total.view(-1))
    return total


_REDUCTIONS: Sequence[tuple[str, dist.ReduceOp.RedOpType, Callable[[Tensor], Tensor]]] = (
    ("sum", dist.ReduceOp.SUM, _sum),
    ("average", dist.ReduceOp.AVG, lambda contributions: _sum(contributions) / len(contributions)),
    ("maximum", dist.ReduceOp.MAX, lambda contributions: contributions.amax(0)),
    ("minimum", dist.ReduceOp.MIN, lambda contributions: contributions.amin(0)),
    ("product", dist.ReduceOp.PRODUCT, lambda contributions: contributions.prod(0)),
)
"""Name, PyTorch's constant, and function of `(world size, ...)` contributions."""


def _reduced(calls: Sequence[Call], index: int) -> Tensor:
    """Reduce every rank's `index`-th input."""
    contributions = torch.stack([call.inputs[index] for call in calls])
    name = reduction_name(calls[0])
    return next(reduce for known, _, reduce in _REDUCTIONS if known == name)(contributions)


# Movements


def _all_reduce(calls: Sequence[Call]) -> None:
    for index in range(len(calls[0].inputs)):
        total = _reduced(calls, index)
        for call in calls:
            _fill(call.outputs[index], total)


def _reduce(calls: Sequence[Call]) -> None:
    root = calls[calls[0].root]
    for index, output in enumerate(root.outputs):
        _fill(output, _reduced(calls, index))


def _broadcast(calls: Sequence[Call]) -> None:
    root = calls[calls[0].root]
    for call in calls:
        if call is not root:
            for output, content in zip(call.outputs, root.inputs, strict=True):
                _fill(output, content)


def _all_gather(calls: Sequence[Call]) -> None:
    for index in range(len(calls[0].inputs)):
        whole = torch.cat([call.inputs[index].reshape(-1) for call in calls])
        for call in calls:
            _fill(call.outputs[index], whole)


def _all_gather_lists(calls: Sequence[Call]) -> None:
    contents = [content for call in calls for content in call.inputs]
    for call in calls:
        for output, content in zip(call.outputs, contents, strict=True):
            _fill(output, content)


def _reduce_scatter(calls: Sequence[Call]) -> None:
    for index in range(len(calls[0].inputs)):
        parts = _reduced(calls, index).reshape(-1).chunk(len(calls))
        for call, part in zip(calls, parts, strict=True):
            _fill(call.outputs[index], part)


def _reduce_scatter_lists(calls: Sequence[Call]) -> None:
    for rank, call in enumerate(calls):
        _fill(call.outputs[0], _reduced(calls, rank))


def _all_to_all(calls: Sequence[Call]) -> None:
    world_size = len(calls)
    if calls[0].has_splits:
        return _all_to_all_uneven(calls)
    # [source, destination, element]: one copy in per source, one strided copy out per destination.
    everything = torch.stack([call.inputs[0].reshape(world_size, -1) for call in calls])
    for rank, call in enumerate(calls):
        call.outputs[0].view(world_size, -1).copy_(everything[:, rank])
    return None


def _all_to_all_uneven(calls: Sequence[Call]) -> None:
    world_size = len(calls)
    parts = [_cut(call.inputs[0], call.input_splits, world_size) for call in calls]
    for rank, call in enumerate(calls):
        places = _cut(call.outputs[0], call.output_splits, world_size)
        for source, place in enumerate(places):
            _fill(place, parts[source][rank])


def _all_to_all_lists(calls: Sequence[Call]) -> None:
    for rank, call in enumerate(calls):
        for source, output in enumerate(call.outputs):
            _fill(output, calls[source].inputs[rank])


def _gather(calls: Sequence[Call]) -> None:
    root = calls[calls[0].root]
    for output, call in zip(root.outputs, calls, strict=True):
        _fill(output, call.inputs[0])


def _scatter(calls: Sequence[Call]) -> None:
    root = calls[calls[0].root]
    for call, content in zip(calls, root.inputs, strict=True):
        _fill(call.outputs[0], content)


def _fill(output: Tensor, content: Tensor) -> None:
    output.copy_(content.view(output.shape) if content.shape != output.shape else content)


def _cut(tensor: Tensor, splits: Sequence[int], world_size: int) -> Sequence[Tensor]:
    return tensor.split(list(splits)) if splits else tensor.chunk(world_size)


_OF_WHOLES: Mapping[str, Movement] = MappingProxyType(
    {
        "barrier": lambda calls: None,
        "all_reduce": _all_reduce,
        "reduce": _reduce,
        "broadcast": _broadcast,
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "all_to_all": _all_to_all,
    }
)
"""By the operation's name: movements for operations on parts of one tensor."""

_OF_LISTS: Mapping[str, Movement] = MappingProxyType(
    {
        "all_gather": _all_gather_lists,
        "reduce_scatter": _reduce_scatter_lists,
        "all_to_all": _all_to_all_lists,
        "gather": _gather,
        "scatter": _scatter,
    }
)
"""By the operation's name: movements for operations on a list of tensors."""
