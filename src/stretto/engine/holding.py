"""The job that trains a parameter, and whether any object still refers to that job: a dropped job cannot be finished.

Note [Dropped jobs]
    Hooks keep a job, and autograd's nodes keep the hooks, in C++ where Python's garbage collection does not look: a
    job that was dropped without `finish` would stay, with its model. So the hooks end when the job's last holder
    does. That can happen at any moment and on any thread, so nothing else is done then: no gradient is touched, no
    rank is informed, and the communication lane's work continues.

Note [Estimates that stay]
    A job that was dropped, or ended by an error, may leave an estimate in the model. Hooks of the model refuse copies
    then, until every parameter has been written by somebody. They refer to parameters weakly: a parameter may refer to
    its module (FSDP2's do), in C++ too, and such a cycle would keep the model for good.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stretto.engine import misuse

_JOB = "stretto job"
"""Key of the job in the metadata of autograd's nodes."""


def adding_node(parameter: Tensor) -> Any:
    """Return autograd's node that adds gradients to `parameter`.

    Hooks on it are not copied with the parameter, and see those gradients alone that are about to be added.
    """
    return torch.autograd.graph.get_gradient_edge(parameter).node


class LeftEstimate:
    """Refuses copies while a parameter shows an estimate that no job will replace; see Note [Estimates that stay]."""

    def __init__(self, parameters: Sequence[Tensor], where: str) -> None:
        self._left = [(weakref.ref(parameter), parameter._version) for parameter in parameters]
        self._where = where

    @property
    def is_shown(self) -> bool:
        """Whether a parameter has not been written since."""
        left = ((reference(), version) for reference, version in self._left)
        return any(parameter is not None and parameter._version == version for parameter, version in left)

    def __call__(self) -> None:
        """Refuse a copy.

        Raises:
            EstimateShown: It raises always; the message names the state to load.
        """
        if self.is_shown:
            raise misuse.estimate_left(self._where)


class Mark:
    """A job's mark on the nodes of its parameters, until it ends."""

    def __init__(self) -> None:
        self._holder: weakref.ref[object] | None = None

    def hold(self, holder: object, let_go: Callable[[], None]) -> None:
        """Set the holder of the job, and the function to call once it is gone; see Note [Dropped jobs]."""
        is_ending = sys.is_finalizing

        def dropped(_: object) -> None:
            if not is_ending():  # nothing stays then anyway, and what is called may be gone
                let_go()

        self._holder = weakref.ref(holder, dropped)

    @property
    def is_held(self) -> bool:
        """Whether any code can still continue or finish the job."""
        return self._holder is None or self._holder() is not None

    def put(self, node: Any) -> None:
        """Mark a parameter's node."""
        node.metadata[_JOB] = self

    def remove(self, node: Any) -> None:
        """Remove the mark, unless the next job has put its own mark there."""
        if node.metadata.get(_JOB) is self:
            del node.metadata[_JOB]


def mark_on(parameter: nn.Parameter) -> Mark | None:
    """Return the mark of the job that trains `parameter`; None if no running job does."""
    is_dense = parameter.layout is torch.strided and not parameter.is_nested  # no job trains others
    if not parameter.requires_grad or is_lazy(parameter) or not is_dense:
        return None
    mark: Mark | None = adding_node(parameter).metadata.get(_JOB)
    return mark
