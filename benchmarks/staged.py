"""Gloo for tensors of a device: every collective goes through the host's memory.

For links on which the copy is not what takes the time: between machines without NCCL's network, and for several ranks
on one device, which NCCL refuses. The host waits until the device has what is sent, and so does the lane's thread; the
caller's goes on.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from stretto.groups.collectives import Call
from stretto.groups.private import part_of, private_group
from stretto.groups.wrapped import WrappedGroup


class StagedGroup(WrappedGroup):
    """A process group over one that takes tensors in the host's memory.

    Args:
        inner: That one, of Gloo or behind a slow link. Ranks use it for nothing else.
    """

    may_wait_again = True
    inner_device = torch.device("cpu")
    orders_streams = False
    """Whoever waits has the host wait until the collective is over."""

    def __init__(self, inner: dist.ProcessGroup) -> None:
        super().__init__(inner, None, "staged")

    def private(self) -> "StagedGroup":
        """Return another such group of the same ranks."""
        return StagedGroup(private_group(self.inner))

    def part(self, members: list[int]) -> "StagedGroup":
        """Return such a group of some of its ranks."""
        return StagedGroup(part_of(self.inner, members))

    def perform(self, call: Call) -> dist.Work:
        """Copy what is read to the host and start there; what is written is copied back by the wait."""
        on_host = {id(one): one.to("cpu", copy=True) for one in call.inputs}  # waits for the stream
        for one in call.outputs:
            on_host.setdefault(id(one), torch.empty(one.shape, dtype=one.dtype))
        given = call.arguments, dict(call.named)
        arguments, named = tree_map_only(Tensor, lambda tensor: on_host[id(tensor)], given)
        work = call._replace(arguments=arguments, named=named).on(self.inner)
        return StagedWork(work, [(one, on_host[id(one)]) for one in call.outputs])


class StagedWork(dist.Work):
    """A collective on copies; whoever waits for it finds the originals written, in the order of the stream it uses.

    Args:
        work: The collective.
        pairs: What is to be written, and its copy in the host's memory.
    """

    def __init__(self, work: dist.Work, pairs: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._work = work
        self._pairs = pairs
        self._outputs = [there for there, _ in pairs]

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the collective, or at most `timeout` where it is not zero; the first wait that ends writes."""
        self._work.wait(timeout) if timeout else self._work.wait()
        pairs, self._pairs = self._pairs, []
        for there, here in pairs:
            there.copy_(here)
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would write, or raise, without waiting for another rank."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Whether the collective is complete and did not fail."""
        return self._work.is_success()

    def exception(self) -> Any:
        """The error that ended the collective, if one did."""
        return self._work.exception()

    def result(self) -> Any:
        """The output tensors; to be read after a wait."""
        return self._outputs
