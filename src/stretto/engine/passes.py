"""Waits for FSDP2's collectives: a wait in a pass through the model ends when its collective cannot complete.

Note [A pass that lasts]
    In a forward or backward pass FSDP2 gathers parameters from the ranks of a node, and sums their gradients. On Gloo
    its own wait returns at the backend's time-out, of half an hour, if a rank of the node never comes. So the job waits
    instead, as for its own collectives: it hears of ranks that raised, died, fell silent or do something else, and
    names them. The model keeps these collectives after the job, when they only wait.

    On NCCL the host does not wait there: it continues, and notices when it waits for the job's own collectives.
"""

import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import FSDPModule

from stretto.engine.sharding import NodeFailures
from stretto.groups.collectives import method_of


def watch_passes(model: nn.Module, failures: NodeFailures, ranks: Sequence[int]) -> None:
    """Let `failures` wait for FSDP2's collectives on Gloo; see Note [A pass that lasts].

    Args:
        model: A model that FSDP2 has sharded.
        failures: The job's detector.
        ranks: The ranks of this node, as the job numbers them.
    """
    gather, scatter = _Gather(failures, ranks), _ReduceScatter(failures, ranks)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(cast(Any, gather))
            module.set_custom_reduce_scatter(cast(Any, scatter))


class _Watched:
    """A collective of FSDP2; the job waits for it while there is a job."""

    def __init__(self, failures: NodeFailures, ranks: Sequence[int]) -> None:
        self._failures = weakref.ref(failures)  # the model outlives the job
        self._ranks = ranks

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for its input or output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _complete(self, work: dist.Work, what: str, async_op: bool) -> dist.Work | None:
        if async_op:
            return work
        failures = self._failures()
        if failures is None or failures.is_over:
            work.wait()
        else:
            failures.wait(work, what, self._ranks)
        return None


class _Gather(_Watched):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        work = method_of(group, "all_gather_single")(output_tensor, input_tensor)
        return self._complete(work, "parameters of a pass inside a node", async_op)


class _ReduceScatter(_Watched):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        options = dist.ReduceScatterOptions()
        options.reduceOp = op
        work = method_of(group, "reduce_scatter_single")(output_tensor, input_tensor, options)
        return self._complete(work, "gradients of a pass inside a node", async_op)
