"""A process group written in Python, and the group of a single process.

`CollectiveGroup` has every method of the table in `stretto.groups.collectives`, and each of them passes a `Call` to
`perform`, the one method that a subclass writes. `SoloGroup` is a group of one rank: no network, no launcher, the same
code path as many ranks.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.distributed_c10d import GroupName
from torch.futures import Future

from stretto.errors import CommunicationError, ConfigError
from stretto.groups.collectives import METHODS, Call, Method


class CollectiveGroup(dist.ProcessGroup):
    """A process group written in Python: all its collectives lead to `perform`.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        name: The name in messages; PyTorch sets its own if it makes the group.
        description: Purpose of the group.
    """

    may_wait_again: bool = False
    """Whether a work stays valid after a wait that times out, as with Gloo. With NCCL such a wait ends the group, so
    Stretto never waits with a timeout for a group that does not set this."""
    orders_streams: bool | None = None
    """Whether a wait without a timeout orders streams, and lets the host continue at once; None if the inner group
    decides."""

    def __init__(self, rank: int, world_size: int, name: str = "", description: str = "") -> None:
        super().__init__(rank, world_size)  # type: ignore[call-arg]  # missing in torch's stub
        self._place = rank, world_size
        self._name = GroupName(name)
        self._description = description

    def perform(self, call: Call) -> dist.Work:
        """Start a collective and return its handle."""
        raise NotImplementedError(f"{type(self).__name__} has collectives, but no perform(call)")

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> dist.Work:
        """Refused: groups that are written in Python perform collectives only.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"a {self.name()} group performs collectives, not send and recv; use a plain Gloo group for those"
        )

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> dist.Work:
        """Refused, as `send`."""
        return self.send(tensors, srcRank, tag)

    @property
    def group_name(self) -> GroupName:
        """The name of this group in PyTorch's registry and in messages."""
        return self._name

    def _set_group_name(self, name: GroupName) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """Purpose of the group."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description


def _flat(tensors: Any) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        return [tensors]
    return [tensor for part in tensors for tensor in _flat(part)]


def _collective(method: Method) -> Callable[..., dist.Work]:
    # What torch passes first: tensors that are changed in place, or outputs and inputs, and rows of either.
    last, splits = min(1, len(method.arguments) - 1), slice(2, len(method.arguments))

    def collective(self: CollectiveGroup, *arguments: Any, **named: Any) -> dist.Work:
        outputs, inputs = (arguments[0], arguments[last]) if method.arguments else ([], [])
        outputs = [outputs] if isinstance(outputs, Tensor) else _flat(outputs)
        inputs = [inputs] if isinstance(inputs, Tensor) else _flat(inputs)
        return self.perform(Call(method, arguments, named, *self._place, inputs, outputs, *arguments[splits]))

    return collective


def _alias(name: str) -> Callable[..., dist.Work]:
    def alias(self: CollectiveGroup, *arguments: Any, **named: Any) -> dist.Work:
        work: dist.Work = getattr(self, name)(*arguments, **named)  # of a subclass, where it has another
        return work

    return alias


# Torch looks these names up on the class, also from C++.
for _method in METHODS:
    setattr(CollectiveGroup, _method.name, _collective(_method))
    for _older in _method.aliases:
        setattr(CollectiveGroup, _older, _alias(_method.name))


class SoloGroup(CollectiveGroup):
    """A group of one rank: every collective copies its input to its output.

    Shapes are checked as real groups check them, so that a mistake shows on one rank already.

    Raises:
        CommunicationError: A collective's output does not fit its input.
    """

    may_wait_again = True

    def __init__(self) -> None:
        super().__init__(0, 1)
        self._store = HashStore()

    def private(self) -> "SoloGroup":
        """Return another group of the same rank, which shares nothing with this group."""
        return SoloGroup()

    def perform(self, call: Call) -> dist.Work:
        """Copy; splits, if given, cover the whole first dimension."""
        for splits, tensors in ((call.output_splits, call.outputs), (call.input_splits, call.inputs)):
            if splits and list(splits) != [tensors[0].shape[0]]:
                raise CommunicationError(
                    f"rank 0 of 1: splits {list(splits)} for a tensor of {tensors[0].shape[0]} rows; "
                    f"on one rank they must be [{tensors[0].shape[0]}] or empty"
                )
        for output, input in zip(call.outputs, call.inputs, strict=True):
            if output is input:
                continue
            if output.numel() != input.numel() or output.dtype != input.dtype:
                raise CommunicationError(
                    f"rank 0 of 1: the output has {output.numel()} elements of {output.dtype}, "
                    f"the input {input.numel()} of {input.dtype}; on one rank they must be the same"
                )
            if output.data_ptr() != input.data_ptr():
                output.copy_(input if input.shape == output.shape else input.reshape(output.shape))
        return CompletedWork(call.outputs)

    def getBackendName(self) -> str:
        """The name shown in messages."""
        return "solo"

    def get_group_store(self) -> Store:
        """Return a store in this process's memory."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: nothing ever waits."""


class CompletedWork(dist.Work):
    """A collective that is complete when it is issued."""

    def __init__(self, result: list[Any]) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True

    def is_success(self) -> bool:
        """True."""
        return True

    def exception(self) -> Exception | None:
        """None."""
        return None

    def result(self) -> list[Any]:
        """The output tensors."""
        return self._result

    def get_future(self) -> Future[list[Any]]:
        """A completed future of the output tensors."""
        future: Future[list[Any]] = Future()
        future.set_result(self._result)
        return future
