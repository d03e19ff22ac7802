"""Gloo's reduce-scatter, with a work whose waits obey their timeout.

Gloo all-reduces a copy of the whole input and keeps one part of it. Its work object neither reports when it is
complete nor ends a wait at a timeout, so a wait for a stopped rank would never return. Here Stretto calls the
all-reduce directly: the same bits by the same bytes, and a work object like every other collective.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from stretto.groups.followed import FollowedWork

_MAIN_MEMORY = torch.device("cpu")


def scatter_of(group: dist.ProcessGroup) -> Callable[..., dist.Work] | None:
    """Return the reduce-scatter for a plain Gloo group; None for any other group."""
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
    """Reduce `input` over the ranks of a Gloo group; the first wait writes this rank's part into `output`.

    Args:
        group: A plain Gloo group.
        output: `(n, ...)`.
        input: Equally many values for each rank, in rank order; not changed.
        options: Reduction and timeout; None sums.
    """
    chosen = dist.AllreduceOptions()
    if options is not None:
        chosen.reduceOp, chosen.timeout = options.reduceOp, options.timeout
    whole = input.clone().view(-1)
    own = whole.view(group.size(), -1)[group.rank()]
    work = group.allreduce([whole], chosen)
    return FollowedWork(work, lambda: output.view(-1).copy_(own), [output])
