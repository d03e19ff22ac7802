"""A group of one rank: no network, no launcher, the same code path as many ranks."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store

from stretto.errors import CommunicationError
from stretto.groups.names import OlderNames
from stretto.groups.work import CompletedWork


class SoloGroup(OlderNames, dist.ProcessGroup):
    """What every collective means on one rank: the output is the input.

    Shapes are checked as real groups check them, so that a mistake shows on one rank already.

    Raises:
        CommunicationError: by a collective whose output does not fit its input.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # missing in torch's stub
        self._store = HashStore()

    def private(self) -> "SoloGroup":
        """Return a group of the same rank that shares nothing with this one."""
        return SoloGroup()

    def allreduce(self, tensors: Any, *options: Any) -> dist.Work:
        """Any reduction of one contribution is that contribution."""
        return CompletedWork(_listed(tensors))

    def allreduce_coalesced(self, tensors: list[Tensor], *options: Any) -> dist.Work:
        """As `allreduce`."""
        return CompletedWork(tensors)

    def broadcast(self, tensors: Any, *options: Any) -> dist.Work:
        """The only rank is the root."""
        return CompletedWork(_listed(tensors))

    def allgather(self, outputs: Any, inputs: Any, *options: Any) -> dist.Work:
        """Copy each input to its only output."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        for (output,), input in zip(outputs, inputs, strict=True):
            _copy(output, input)
        return CompletedWork([output for (output,) in outputs])

    def all_gather_single(self, output: Tensor, input: Tensor, *options: Any) -> dist.Work:
        """Copy."""
        _copy(output, input)
        return CompletedWork([output])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, *options: Any) -> dist.Work:
        """Copy."""
        _copy(output, input)
        return CompletedWork([output])

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], *options: Any
    ) -> dist.Work:
        """Copy; splits, where given, are the whole first dimension."""
        _check_splits(output, output_splits)
        _check_splits(input, input_splits)
        _copy(output, input)
        return CompletedWork([output])

    def barrier(self, *options: Any, **named: Any) -> dist.Work:
        """Nobody to wait for."""
        return CompletedWork([])

    def getBackendName(self) -> str:
        """The name shown in messages."""
        return "solo"

    def get_group_store(self) -> Store:
        """A store in this process's memory."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Nothing ever waits."""


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _copy(output: Tensor, input: Tensor) -> None:
    if output.numel() != input.numel() or output.dtype != input.dtype:
        raise CommunicationError(
            f"rank 0 of 1: the output has {output.numel()} elements of {output.dtype}, "
            f"the input {input.numel()} of {input.dtype}; on one rank they must be the same"
        )
    if output.data_ptr() != input.data_ptr():
        output.view(-1).copy_(input.reshape(-1))


def _check_splits(tensor: Tensor, splits: list[int]) -> None:
    if splits and list(splits) != [tensor.shape[0]]:
        raise CommunicationError(
            f"rank 0 of 1: splits {list(splits)} for a tensor of {tensor.shape[0]} rows; "
            f"on one rank they must be [{tensor.shape[0]}] or empty"
        )
