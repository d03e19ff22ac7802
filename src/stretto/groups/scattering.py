"""Gloo's reduce-scatter, with a work whose waits end in time.

Gloo all-reduces a copy of the whole input and keeps one part of it. Its own work for that says neither when it is
complete nor gives up at a timeout, so whoever waits for a rank that is stopped would never look around. Here the
all-reduce is asked for by itself: the same bits by the same bytes, and a work like that of every other collective.
"""

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

_MAIN_MEMORY = torch.device("cpu")


def scatter_of(group: dist.ProcessGroup) -> Callable[..., dist.Work] | None:
    """Return the reduce-scatter of a group of Gloo itself; None of any other group."""
    if type(group) is not dist.ProcessGroup:
        return None
    try:
        is_gloo = group._get_backend(_MAIN_MEMORY).name() == "gloo"
    except RuntimeError:  # it has no backend for tensors there
        return None
    return partial(_scatter, group) if is_gloo else None


def _scatter(
    group: dist.ProcessGroup, output: Tensor, input: Tensor, options: dist.ReduceScatterOptions | None = None
) -> dist.Work:
    """Reduce `input` over the ranks of a Gloo group, and write this rank's part into `output`.

    Args:
        group: Of Gloo itself.
        output: `(n, ...)`.
        input: As many values for each rank, in their order; it stays as it is.
        options: With the reduction and the timeout; None sums.
    """
    chosen = dist.AllreduceOptions()
    if options is not None:
        chosen.reduceOp, chosen.timeout = options.reduceOp, options.timeout
    whole = input.clone().view(-1)
    own = whole.view(group.size(), -1)[group.rank()]
    return _Scatter(group.allreduce([whole], chosen), own, output)


class _Scatter(dist.Work):
    """An all-reduce, of whose result one part is copied out once somebody waits for it.

    Args:
        work: It.
        own: The part, in the memory of the result.
        output: Takes it.
    """

    def __init__(self, work: dist.Work, own: Tensor, output: Tensor) -> None:
        super().__init__()
        self._work, self._own, self._output = work, own, output
        self._copying = threading.Lock()
        self._is_copied = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the output is there; at most `timeout`, where it is not zero.

        Raises:
            RuntimeError: It is not, within `timeout`; or the collective has failed.
        """
        self._work.wait(timeout)
        self._copy()
        return True

    def is_completed(self) -> bool:
        """Whether `wait` returns or raises at once."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Whether the collective is complete and has not failed."""
        return self._work.is_success()

    def exception(self) -> Any:
        """The error that has ended it, if one has."""
        return self._work.exception()

    def result(self) -> list[Tensor]:
        """The output, once complete."""
        self._copy()
        return [self._output]

    def get_future(self) -> Future[Any]:
        """A future of the output."""
        future: Future[Any] = self._work.get_future().then(self._outcome)
        return future

    def _outcome(self, reduced: Future[Any]) -> list[Tensor]:
        reduced.wait()  # raises what the collective has ended with
        return self.result()

    def _copy(self) -> None:
        with self._copying:
            if not self._is_copied:
                self._output.view(-1).copy_(self._own)
                self._is_copied = True
