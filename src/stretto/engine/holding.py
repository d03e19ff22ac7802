"""Which job trains a parameter, and whether anybody still holds that job: one that was dropped cannot be finished."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stretto.errors import Finished

_JOB = "stretto job"
"""Key in the metadata of autograd's nodes that a job has hooks on."""


def adding_node(parameter: Tensor) -> Any:
    """Return autograd's node that adds gradients to `parameter`.

    Hooks on it are not copied with the parameter, and see those gradients alone that are about to be added.
    """
    return torch.autograd.graph.get_gradient_edge(parameter).node


class Mark:
    """What a job leaves on the nodes of its parameters, until it ends."""

    def __init__(self) -> None:
        self._holder: weakref.ref[object] | None = None
        self._end: Callable[[BaseException], None] | None = None

    def hold(self, holder: object, end: Callable[[BaseException], None]) -> None:
        """Say who holds the job, and what ends it."""
        self._holder, self._end = weakref.ref(holder), end

    @property
    def is_held(self) -> bool:
        """Whether somebody can still go on with the job, or finish it."""
        return self._holder is None or self._holder() is not None

    def give_up(self) -> None:
        """End the job, which nobody holds."""
        if self._end is not None:
            self._end(Finished("the job was dropped without finish()"))

    def put(self, node: Any) -> None:
        """Mark a parameter's node."""
        node.metadata[_JOB] = self

    @staticmethod
    def remove(node: Any) -> None:
        """Take the mark away."""
        node.metadata.pop(_JOB, None)


def mark_on(parameter: nn.Parameter) -> Mark | None:
    """Return the mark of the job that trains `parameter`; None if none does that has not ended."""
    if not parameter.requires_grad or is_lazy(parameter):
        return None
    mark: Mark | None = adding_node(parameter).metadata.get(_JOB)
    return mark
