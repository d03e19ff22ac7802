"""One rank's call of a collective: what all ranks must agree on, and what each one brings.

What collectives do with tensors, once all ranks have brought theirs: a few operations per rank, not per pair.

Reductions add in rank order, so that results do not depend on who came first.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from stretto.exchange.sums import sum_in_rank_order
from stretto.virtual.network import Pattern


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """What every rank must say alike of one collective."""

    operation: str
    dtypes: tuple[str, ...]
    numels: tuple[int, ...]
    """Elements of every tensor that a rank brings; empty where ranks may bring different numbers."""
    root: int | None = None
    reduction: str | None = None

    def __str__(self) -> str:
        sizes = ", ".join(str(numel) for numel in self.numels)
        parts = [
            self.operation,
            f"of {sizes} elements" if self.numels else "",
            f"in {', '.join(dict.fromkeys(self.dtypes))}" if self.dtypes else "",
            f"with root {self.root}" if self.root is not None else "",
            f"by {self.reduction}" if self.reduction is not None else "",
        ]
        return " ".join(part for part in parts if part)


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One rank's part of one collective."""

    terms: Terms
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    sent_bytes: int
    pattern: Pattern
    input_splits: Sequence[int] = ()
    """Rows for every rank; empty for equal parts."""
    output_splits: Sequence[int] = ()
    """Rows from every rank; empty for equal parts."""


def terms(
    operation: str, tensors: Sequence[Tensor], root: int | None = None, reduction: str | None = None
) -> Terms:
    """Return the terms of a collective to which every rank brings tensors of equal sizes."""
    return Terms(
        operation,
        tuple([str(tensor.dtype).removeprefix("torch.") for tensor in tensors]),
        tuple([tensor.numel() for tensor in tensors]),
        root,
        reduction,
    )


def move(calls: Sequence[Call]) -> None:
    """Perform a collective.

    Args:
        calls: Those of all ranks, in rank order, on equal terms.
    """
    with torch.no_grad():
        MOVEMENTS[calls[0].terms.operation](calls)


def _nothing(calls: Sequence[Call]) -> None:
    """A barrier moves nothing."""


def _all_reduce(calls: Sequence[Call]) -> None:
    for index in range(len(calls[0].inputs)):
        total = _reduced(calls, index)
        for call in calls:
            _fill(call.outputs[index], total)


def _reduce(calls: Sequence[Call]) -> None:
    root = calls[0].terms.root or 0
    for index in range(len(calls[0].inputs)):
        _fill(calls[root].outputs[index], _reduced(calls, index))


def _broadcast(calls: Sequence[Call]) -> None:
    root = calls[0].terms.root or 0
    for rank, call in enumerate(calls):
        if rank != root:
            for output, content in zip(call.outputs, calls[root].inputs, strict=True):
                _fill(output, content)


def _all_gather(calls: Sequence[Call]) -> None:
    for index in range(len(calls[0].inputs)):
        whole = torch.cat([call.inputs[index].reshape(-1) for call in calls])
        for call in calls:
            _fill(call.outputs[index], whole)


def _all_gather_lists(calls: Sequence[Call]) -> None:
    contents = [call.inputs[0] for call in calls]
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
    if any(call.input_splits or call.output_splits for call in calls):
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
    root = calls[calls[0].terms.root or 0]
    for output, call in zip(root.outputs, calls, strict=True):
        _fill(output, call.inputs[0])


def _scatter(calls: Sequence[Call]) -> None:
    root = calls[calls[0].terms.root or 0]
    for call, content in zip(calls, root.inputs, strict=True):
        _fill(call.outputs[0], content)


def _reduced(calls: Sequence[Call], index: int) -> Tensor:
    """Reduce every rank's `index`-th input, in rank order."""
    contributions = torch.stack([call.inputs[index] for call in calls])
    return REDUCTIONS[calls[0].terms.reduction or "sum"](contributions)


def _summed(contributions: Tensor) -> Tensor:
    total = torch.empty_like(contributions[0])
    sum_in_rank_order(contributions.flatten(1), total.view(-1))
    return total


def _fill(output: Tensor, content: Tensor) -> None:
    output.copy_(content.view(output.shape) if content.shape != output.shape else content)


def _cut(tensor: Tensor, splits: Sequence[int], world_size: int) -> Sequence[Tensor]:
    return tensor.split(list(splits)) if splits else tensor.chunk(world_size)


REDUCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "sum": _summed,
        "average": lambda contributions: _summed(contributions) / len(contributions),
        "maximum": lambda contributions: contributions.amax(0),
        "minimum": lambda contributions: contributions.amin(0),
        "product": lambda contributions: contributions.prod(0),
    }
)

MOVEMENTS: Mapping[str, Callable[[Sequence[Call]], None]] = MappingProxyType(
    {
        "barrier": _nothing,
        "all_reduce": _all_reduce,
        "reduce": _reduce,
        "broadcast": _broadcast,
        "all_gather": _all_gather,
        "all_gather of lists": _all_gather_lists,
        "reduce_scatter": _reduce_scatter,
        "reduce_scatter of lists": _reduce_scatter_lists,
        "all_to_all": _all_to_all,
        "all_to_all of lists": _all_to_all_lists,
        "gather": _gather,
        "scatter": _scatter,
    }
)
